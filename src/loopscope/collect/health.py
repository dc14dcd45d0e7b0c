"""The rows of the health table: what happened to the measurement itself, and what the run must be told.

At every traced step: `coverage`, `trace_bytes`, `timing`; at every probe step `probe_coverage`. When it
happens: `sink_fault` (a position recorded twice), `visit_failed` (a reduction raised), `error` (a callback
failed), `trace_incomplete` (microbatches that never came), `no_valid_token`, `closure`, `nonfinite_loss`,
`nonfinite_probe_loss` (tokens of a probe), and the faults of a visit's values: `nonfinite`,
`weights_not_normalised`, `index_out_of_range`, `probabilities_as_logits`, `metric_failed`. What an integration
adds: `probe_cost` (share of the time so far), `probe_failed`, `probe_skipped`, `probe_stretched`,
`probe_every_not_reached`, `offline_probe_done` (all rows of a checkpoint are written). Of trackers:
`tracker_started`, `tracker_failed`, `tracker_keys`. Of the store: `dropped_rows`, `fsync_failed`, `upload_failed`,
`disk_filling`; of rows that were written by hand, `nonfinite` and `bad_value` (values that are null instead).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

from loopscope.collect.context import RowDict
from loopscope.collect.coverage import Coverage
from loopscope.collect.pairs import Key, Pair
from loopscope.metrics import Fault

Severity = Literal["info", "warn", "critical"]


def event(
    name: str,
    severity: Severity,
    *,
    detail: str | None = None,
    unrolled_pos: int | None = None,
    count: int | None = None,
    value: float | None = None,
) -> RowDict:
    """One health row without run-level keys. `detail` is text, never an object."""
    return {
        "event": name,
        "severity": severity,
        "unrolled_pos": unrolled_pos,
        "count": count,
        "value": value,
        "detail": detail,
    }


def of_coverage(coverage: Coverage, *, has_promise: bool = True, event_name: str = "coverage") -> RowDict:
    """The step's coverage, complete or not: `count` visits seen, `value` their share of the expected."""
    severity: Severity = "warn" if coverage.missing else "info"
    if coverage.unexpected:
        severity = "critical"
    detail = coverage.detail() if has_promise else "nothing is promised that could be compared with"
    return event(event_name, severity, count=coverage.seen, value=coverage.ratio, detail=detail)


def of_failures(failures: Mapping[Key, str]) -> list[RowDict]:
    """One row per visit or pair whose reduction raised, with why."""
    return [
        event(
            "visit_failed",
            "critical",
            detail=detail,
            unrolled_pos=(key.target if isinstance(key, Pair) else key).unrolled_pos,
        )
        for key, detail in failures.items()
    ]


def of_faults(faults: Iterable[tuple[int, Fault]]) -> list[RowDict]:
    """One row per visit and kind of fault of its values (`nonfinite`, `weights_not_normalised`, ...).

    One bad value often shows in several tensors of a visit; `count` is the largest, `detail` names them all.
    """
    grouped: dict[tuple[int, str], list[Fault]] = {}
    for position, fault in faults:
        grouped.setdefault((position, fault.kind), []).append(fault)
    return [
        event(
            kind,
            "warn" if kind == "weights_not_normalised" else "critical",
            unrolled_pos=position,
            count=max(fault.count for fault in found),
            detail=" ".join(fault.message for fault in found),
        )
        for (position, kind), found in grouped.items()
    ]


def of_timing(seconds: Mapping[str, float], num_microbatches: int) -> RowDict:
    """Loopscope's own time in a traced step: `value` seconds in all, `detail` taken apart."""
    detail = json.dumps({name: round(value, 6) for name, value in seconds.items()})
    return event("timing", "info", count=num_microbatches, value=sum(seconds.values()), detail=detail)


def of_bytes(num_bytes: int) -> RowDict:
    """Bytes that the step's traces kept alive until their callbacks, over all microbatches (and ranks)."""
    return event("trace_bytes", "info", value=float(num_bytes))
