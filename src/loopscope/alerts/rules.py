"""One pure function per rule: rows in, readings out.

A reading's `excess` is the value in units of its bound: above 1 the bound is broken. For a bound that the
value must not fall below it is the shortfall that is compared, so that "back at 80% of the bound" means the
same everywhere. A rule that cannot be judged for a row (a missing value, too few loop steps) gives no reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from loopscope.alerts.settings import AlertSettings

Row = Mapping[str, Any]

FALL = 0.1
"""Growth − 1 must have lost this share over the last three loop steps to count as falling."""
_INFINITE = math.inf


class Reading(NamedTuple):
    """A rule's look at one row. A tuple, since five are made per visit and traced step."""

    rule: str
    subject: str
    """The visit or pair, for people."""
    value: float
    excess: float
    critical: bool = False
    text: str = ""
    """The value and its bound, for people; empty where the bound is kept, for most rows keep it."""
    since: int | None = None
    """Where a rule looks back itself: the step at which what it found began; None: at this row."""


def maxvio(row: Row, subject: str, s: AlertSettings) -> Reading | None:
    """maxvio_count against a share of its maximum, and against what sampling alone shows."""
    value, experts, k, tokens = (row.get(n) for n in ("maxvio_count", "num_experts", "top_k", "num_tokens"))
    if value is None or not experts or not k or not tokens or experts <= k:
        return None
    most = experts / k - 1
    noise = s.maxvio_noise * math.sqrt(2 * math.log(experts) * experts / (k * tokens))
    bound = max(s.maxvio_share * most, noise)
    if value <= bound:
        return Reading("maxvio", subject, value, value / bound)
    critical = value > max(s.maxvio_critical * most, noise)
    text = f"maxvio_count {value:.3g}, bound {bound:.3g}, largest possible {most:.3g}"
    return Reading("maxvio", subject, value, value / bound, critical, text)


def load_entropy(row: Row, subject: str, s: AlertSettings) -> Reading | None:
    """load_entropy_ratio against its bound, as a shortfall from 1."""
    value = row.get("load_entropy_ratio")
    if value is None:
        return None
    excess = _shortfall(value, s.load_entropy)
    if excess <= 1:
        return Reading("load_entropy", subject, value, excess)
    text = f"load_entropy_ratio {value:.3g}, bound {s.load_entropy:g}"
    return Reading("load_entropy", subject, value, excess, value < s.load_entropy_critical, text)


def router_collapse(row: Row, subject: str, s: AlertSettings) -> Reading | None:
    """Token entropy and mutual information, both below their bounds."""
    entropy, mutual, experts = (
        row.get(n) for n in ("token_entropy_ratio", "mutual_information", "num_experts")
    )
    if entropy is None or mutual is None or not experts or experts < 2:
        return None
    share = mutual / math.log(experts)
    worst = max(entropy, share)
    excess = s.collapse / worst if worst > 0 else _INFINITE
    if excess <= 1:
        return Reading("router_collapse", subject, worst, excess)
    text = f"token_entropy_ratio {entropy:.3g}, mutual_information {share:.3g} ln E, bound {s.collapse:g}"
    return Reading("router_collapse", subject, worst, excess, True, text)


def z(row: Row, subject: str, s: AlertSettings) -> Reading | None:
    """|z_mean| against ln E + 10, the largest logit against 50: whichever is further out."""
    experts, mean, largest = (row.get(n) for n in ("num_experts", "z_mean", "logit_abs_max"))
    found: list[tuple[float, float, str, float]] = []
    if mean is not None and experts:
        bound = math.log(experts) + s.z_above
        found.append((abs(mean) / bound, mean, "z_mean", bound))
    if largest is not None:
        found.append((largest / s.logit_abs_max, largest, "logit_abs_max", s.logit_abs_max))
    if not found:
        return None
    excess, value, name, bound = max(found)
    text = f"{name} {value:.3g}, bound {bound:.3g}" if excess > 1 else ""
    return Reading("z", subject, value, excess, False, text)


def token_correlation(row: Row, subject: str, s: AlertSettings) -> Reading | None:
    """token_correlation of the last loop visit."""
    value = row.get("token_correlation")
    if value is None:
        return None
    text = f"token_correlation {value:.3g}, bound {s.token_correlation:g}"
    return Reading("token_correlation", subject, value, value / s.token_correlation, False, text)


def loop_growth(growths: list[float], subject: str, s: AlertSettings) -> Reading | None:
    """Growth at one layer's last three step boundaries, in the loop's order.

    The reading is 0 where growth falls. Fewer than three cannot be judged.
    """
    if len(growths) < 3:
        return None
    first, middle, last = growths[-3:]
    falling = first > middle > last and (last - 1) < (1 - FALL) * (first - 1)
    text = f"growth {first:.3g}, {middle:.3g}, {last:.3g} over the last loop steps, bound {s.growth:g}"
    # In units of the bound's distance from 1: a state that keeps its size has an excess of 0.
    excess = 0.0 if falling else max(0.0, (last - 1) / (s.growth - 1)) if s.growth > 1 else last / s.growth
    return Reading("loop_growth", subject, last, excess, False, text)


def loop_delta(value: float | None, best: float | None, subject: str, s: AlertSettings) -> Reading | None:
    """relative_delta at a layer's last step boundary against the best mean that the run has had."""
    if value is None or best is None or best <= 0:
        return None
    bound = s.relative_delta * best
    text = f"relative_delta {value:.3g}, best mean {best:.3g}, bound {bound:.3g}"
    return Reading("loop_delta", subject, value, value / bound, False, text)


def closure(row: Row, s: AlertSettings) -> Reading | None:
    """closure_error against float32 noise; says which part would explain it."""
    error, total = row.get("closure_error"), row.get("total_loss")
    if error is None or total is None:
        return None
    bound = s.closure * max(1.0, abs(total))
    text = f"closure_error {error:.3g}, bound {bound:.3g}"
    if abs(error) > bound and (guess := explain_closure(row)):
        text += f": {guess}"
    return Reading("closure", "loss", error, abs(error) / bound, True, text)


def explain_closure(row: Row) -> str | None:
    """The auxiliary loss that a closure error is a whole multiple of, in words; None where none is."""
    error = row["closure_error"]
    for name, words in (("lb_loss", "the load-balancing loss"), ("z_loss", "the z-loss")):
        value, factor = row.get(name), row.get(f"{name}_factor")
        if not value or not factor:
            continue
        times = error / (factor * value)
        if abs(times - round(times)) < 0.02 and round(times) != 0:
            return f"{words} ({name}) is counted {_counted(1 + round(times))} in the total"
    return None


def health_events(row: Row, events: Mapping[str, str]) -> Reading | None:
    """A health row that is more than information, under the rule that its event belongs to."""
    name, severity = row.get("event"), row.get("severity")
    if name is None or severity in (None, "info") or name in ("closure", "alert"):
        return None
    count = row.get("count")
    position = row.get("unrolled_pos")
    where = "" if position is None else f" at depth {position}"
    text = f"{name}{where}: {row.get('detail') or (count if count is not None else 'no detail')}"
    rule = events.get(name, "other")
    return Reading(rule, name, float(count or 1), _INFINITE, severity == "critical", text)


def visit_names(rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
    """Rows of one trace with their visit's name, which holds for every R: tail visits count from the tail's start."""
    ordered = sorted(rows, key=lambda row: row["unrolled_pos"])
    tails = 0
    for row in ordered:
        if row.get("block") == "loop":
            yield row, f"loop step {row['loop_step']}, layer {row['layer_idx']}"
        elif row.get("block") == "tail":
            yield row, f"tail {tails}"
            tails += 1
        else:
            yield row, f"{row.get('block') or 'depth'} {row['unrolled_pos']}"


def _shortfall(value: float, bound: float) -> float:
    return (1 - value) / (1 - bound) if bound < 1 else bound / max(value, 1e-12)


def _counted(times: int) -> str:
    return {0: "not at all", 2: "twice", 3: "three times"}.get(times, f"{times} times")
