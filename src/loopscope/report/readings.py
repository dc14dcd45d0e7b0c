"""How a check of the first screen is read off the rows: the rules' own functions, at the place furthest out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loopscope.alerts import AlertSettings, Reading
from loopscope.alerts import rules as judge
from loopscope.report.queries import RunQueries


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A value in words."""

    text: str
    excess: float = 0.0
    """In units of its bound."""
    judged: bool = True
    """False where there is a value, but no rule for it."""


def closure(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The step whose loss adds up worst."""
    if not look.has("loss"):
        return None
    where = look.scope("loss").where
    rows = look.rows(
        "select closure_error, total_loss, lb_loss, lb_loss_factor, z_loss, z_loss_factor, count(*) over () as n "
        f"from loss where {where} and closure_error is not null "
        "order by abs(closure_error) / greatest(1, abs(total_loss)) desc limit 1"
    )
    reading = judge.closure(rows[0], settings) if rows else None
    if reading is None:
        return None
    text = f"total and parts differ by at most {abs(reading.value):.2g} nats in {_many(rows[0]['n'], 'step')}"
    return Seen(text=text, excess=reading.excess)


def finite(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """Non-finite values of losses, router tensors and residuals."""
    steps, entries, known = 0, 0, False
    if look.has("loss"):
        known = True
        steps = look.rows(f"select count(nonfinite_fields) as n from loss where {look.scope('loss').where}")[
            0
        ]["n"]
    for table in ("router", "residual"):
        if look.has(table):
            known = True
            entries += look.rows(
                f"select coalesce(sum(nonfinite_count), 0) as n from {table} where {look.scope(table).where}"
            )[0]["n"]
    text = f"{_many(steps, 'step')} with a non-finite loss, {entries:,} non-finite entries in traces"
    return Seen(text=text, excess=2.0 if steps or entries else 0.0) if known else None


def dead(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """Experts that got nothing over the whole window, all visits together."""
    if not look.has("router"):
        return None
    recent = _recent(look, "router", settings)
    row = look.rows(f"""
        select count(*) filter (c = 0) as dead, count(*) as n from (
            select b, r, l, expert, sum(c) as c from (
                select b, r, l, unnest(expert_count) as c, unnest(range(len(expert_count))) as expert
                from {look.visits("router")} where step in ({recent}))
            group by b, r, l, expert)""")[0]
    if not row["n"]:
        return None
    text = f"{row['dead']} of the {row['n']:,} experts of all visits got no token"
    return Seen(text=text, excess=2.0 if row["dead"] else 0.0)


def load_entropy(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The least even visit."""
    return _worst(
        (
            judge.load_entropy(row, name, settings),
            f"load entropy {_n(row['load_entropy_ratio'])} of 1 at {name}",
        )
        for row, name in _visits(look, settings)
    )


def maxvio(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The visit with the most overloaded expert."""

    def told(row: Any, name: str) -> str:
        most = (
            f", {row['num_experts'] / row['top_k'] - 1:.3g} is possible"
            if row["num_experts"] and row["top_k"]
            else ""
        )
        return f"MaxVio {_n(row['maxvio_count'])} at {name}{most}"

    return _worst(
        (judge.maxvio(row, name, settings), told(row, name)) for row, name in _visits(look, settings)
    )


def collapse(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The visit whose router is surest and tells tokens apart least."""
    return _worst(
        (
            judge.router_collapse(row, name, settings),
            f"token entropy {_n(row['token_entropy_ratio'])} of 1 at {name}",
        )
        for row, name in _visits(look, settings)
    )


def logits(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The visit with the largest logits."""
    return _worst(
        (
            judge.z(row, name, settings),
            f"largest logit {_n(row['logit_abs_max'])}, mean logsumexp {_n(row['z_mean'])} at {name}",
        )
        for row, name in _visits(look, settings)
    )


def growth(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The layer whose state grows most at the loop's end."""
    found = []
    for layer, rows in _boundaries(look, settings).items():
        values = [row["growth"] for row in rows if row["growth"] is not None]
        if values:
            told = (
                f"growth {', '.join(_n(value) for value in values[-3:])} over the last passes, layer {layer}"
            )
            found.append((judge.loop_growth(values, f"layer {layer}", settings), told, values[-1]))
    seen = _worst((reading, told) for reading, told, _ in found)
    if seen is None and found:
        told = max(found, key=lambda each: each[2])[1]
        return Seen(text=f"{told}; fewer than 3 are not judged", judged=False)
    return seen


def movement(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """The layer whose last pass moves the state furthest, in units of its best mean."""
    best = _best_deltas(look, settings)
    found = []
    for layer, rows in _boundaries(look, settings).items():
        delta, least = rows[-1]["relative_delta"], best.get((layer, rows[-1]["to_loop_step"]))
        told = f"the last pass moves the state by {_n(delta)}, at best by {_n(least)}, layer {layer}"
        found.append((judge.loop_delta(delta, least, f"layer {layer}", settings), told))
    return _worst(found)


def correlation(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """Tokens' likeness after the loop."""
    if not look.has("residual"):
        return None
    rows = look.rows(
        f"select unrolled_pos, avg(token_correlation) as token_correlation from residual "
        f"where {look.scope('residual').where} and block = 'loop' and step in ({_recent(look, 'residual', settings)}) "
        "group by unrolled_pos order by unrolled_pos desc limit 1"
    )
    return _worst(
        (
            judge.token_correlation(row, "last loop visit", settings),
            f"mean cosine of two tokens {_n(row['token_correlation'])} after the loop",
        )
        for row in rows
    )


def measured(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """Coverage of the traces, and everything that was written because somebody should look."""
    if not look.has("health"):
        return None
    row = look.rows(
        "select count(*) filter (event = 'coverage') as traces, min(value) filter (event = 'coverage') as least, "
        "count(*) filter (severity <> 'info' and event not in ('closure', 'alert')) as events from health"
    )[0]
    if not row["traces"]:
        return None
    seen = (
        "every visit"
        if row["least"] is None or row["least"] >= 1
        else f"at least {row['least']:.0%} of the visits"
    )
    text = f"{seen} seen in {_many(row['traces'], 'trace')}; {_many(row['events'], 'event')} to look at"
    return Seen(text=text, excess=2.0 if row["least"] is not None and row["least"] < 1 else 0.0)


def files(look: RunQueries, settings: AlertSettings) -> Seen | None:
    """Problems of the run's files."""
    count = len(look.run.problems)
    text = "every file was read, and its checksum is right" if not count else _many(count, "problem")
    return Seen(text=text, excess=2.0 if count else 0.0)


def _visits(look: RunQueries, settings: AlertSettings) -> Iterable[tuple[Any, str]]:
    if not look.has("router"):
        return ()
    rows = look.once(
        "visits of the last traces",
        lambda: look.rows(f"""
        select b, r, l, any_value(block) as block, min(unrolled_pos) as unrolled_pos, any_value(loop_step) as loop_step,
            any_value(layer_idx) as layer_idx, any_value(num_experts) as num_experts, any_value(top_k) as top_k,
            avg(num_tokens) as num_tokens, avg(maxvio_count) as maxvio_count,
            avg(load_entropy_ratio) as load_entropy_ratio, avg(token_entropy_ratio) as token_entropy_ratio,
            avg(mutual_information) as mutual_information, avg(z_mean) as z_mean, avg(logit_abs_max) as logit_abs_max
        from {look.visits("router")} where step in ({_recent(look, "router", settings)}) group by b, r, l"""),
    )
    return judge.visit_names(rows)


def _boundaries(look: RunQueries, settings: AlertSettings) -> dict[int, list[dict[str, Any]]]:
    """Layer → means at its step boundaries, in the loop's order."""
    if not look.has("transition"):
        return {}
    rows = look.rows(
        "select to_layer_idx, to_loop_step, avg(growth) as growth, avg(relative_delta) as relative_delta "
        f"from transition where {look.scope('transition').where} and kind = 'step_boundary' "
        f"and step in ({_recent(look, 'transition', settings)}) group by all order by all"
    )
    layers: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        layers.setdefault(row["to_layer_idx"], []).append(row)
    return layers


def _best_deltas(look: RunQueries, settings: AlertSettings) -> dict[tuple[int, int], float]:
    """(layer, loop step) → the smallest mean of a whole window that the run has had."""
    if not look.has("transition"):
        return {}
    rows = look.rows(
        "select to_layer_idx, to_loop_step, min(mean) as best from (select to_layer_idx, to_loop_step, "
        "avg(relative_delta) over w as mean, count(relative_delta) over w as n from transition "
        f"where {look.scope('transition').where} and kind = 'step_boundary' and step > {settings.warmup_steps} "
        "window w as (partition by to_layer_idx, to_loop_step order by step "
        f"rows between {settings.sustain - 1} preceding and current row)) where n = {settings.sustain} group by all"
    )
    return {(row["to_layer_idx"], row["to_loop_step"]): row["best"] for row in rows}


def _recent(look: RunQueries, table: str, settings: AlertSettings) -> str:
    where = look.scope(table).where
    return f"select distinct step from {table} where {where} order by step desc limit {settings.sustain}"


def _worst(readings: Iterable[tuple[Reading | None, str]]) -> Seen | None:
    found = [(reading, text) for reading, text in readings if reading is not None]
    if not found:
        return None
    worst, text = max(found, key=lambda each: each[0].excess)
    return Seen(text=text, excess=worst.excess)


def _n(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
