"""Rows → the scalars of a step. Their number does not depend on the model's depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loopscope.collect import headline

Row = Mapping[str, Any]

_LOSS = {
    "loss/task": "task_loss",
    "loss/total": "total_loss",
    "loss/closure_error": "closure_error",
    "moe/lb_loss": "lb_loss",
    "moe/z_loss": "z_loss",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
}
_HEALTH = {
    "coverage": "health/coverage",
    "timing": "health/trace_seconds",
}
_REPETITION = ("low", "mid", "high")

CORE_KEYS = (
    *_LOSS,
    "moe/maxvio_max",
    "moe/maxvio_pos",
    "moe/dead",
    "moe/load_entropy_min",
    "moe/token_entropy_min",
    "moe/margin_min",
    "moe/z_mean",
    "moe/logit_abs_max",
    "loop/relative_delta_last",
    "loop/growth_last",
    "loop/state_cosine_last",
    "loop/topk_overlap_last",
    "loop/token_corr_last",
    "probe/loss",
    *(f"probe/loss_repetition_{name}" for name in _REPETITION),
    "probe/overlap_mean",
    *_HEALTH.values(),
    "health/events",
    "health/dropped",
    "loopscope/attempt",
    "loopscope/tokens_seen",
)
"""Every scalar but those of the user's own metrics; each has its place in a tracker's budget from the start."""

CUSTOM = "custom:"
"""Prefix of the health events that hold the user's own metrics, one per visit."""


def of_loss(row: Row) -> dict[str, float]:
    """`loss/*`, `moe/lb_loss`, `moe/z_loss`, `optim/*`: columns of the step's `loss` row, as they are there."""
    return {key: float(row[column]) for key, column in _LOSS.items() if row.get(column) is not None}


def of_trace(tables: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """`moe/*` and `loop/*`: those of `loopscope.collect.headline`, and the least `token_entropy_ratio` and
    `margin_mean` of all visits, and `state_cosine` and `topk_overlap` of the deepest `step_boundary` pair."""
    found = headline.of_trace(tables)
    router = tables.get("router", ())
    for key, column in (("token_entropy", "token_entropy_ratio"), ("margin", "margin_mean")):
        if values := [row[column] for row in router if row.get(column) is not None]:
            found[f"moe/{key}_min"] = min(values)
    boundaries = [row for row in tables.get("transition", ()) if row.get("kind") == "step_boundary"]
    if boundaries:
        last = max(boundaries, key=lambda row: row["to_pos"])
        for column in ("state_cosine", "topk_overlap"):
            if last.get(column) is not None:
                found[f"loop/{column}_last"] = last[column]
    return found


def of_probe(tables: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """`probe/loss` (of the whole corpus, and of its repetition strata) and `probe/overlap_mean`."""
    losses = tables.get("probe_loss", ())
    pairs = tables.get("probe_overlap", ())
    overlaps = [row["topk_overlap"] for row in pairs if row.get("topk_overlap") is not None]
    found = headline.of_probe(losses, overlaps)
    for row in losses:
        if row["stratum_kind"] == "repetition" and row["stratum"] in _REPETITION:
            found[f"probe/loss_repetition_{row['stratum']}"] = row["loss_mean"]
    return found


def of_health(rows: Iterable[Row]) -> dict[str, float]:
    """`health/*` of one step's health rows, and `custom/NAME_mean` and `_max` of the user's own metrics over visits."""
    found: dict[str, float] = {}
    own: dict[str, list[float]] = {}
    for row in rows:
        event, value = row["event"], row.get("value")
        if value is None:
            continue
        if event in _HEALTH:
            found[_HEALTH[event]] = value
        elif event.startswith(CUSTOM):
            own.setdefault(event.removeprefix(CUSTOM), []).append(value)
    for name, values in own.items():
        found[f"custom/{name}_mean"] = sum(values) / len(values)
        found[f"custom/{name}_max"] = max(values)
    return found
