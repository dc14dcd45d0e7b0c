"""The few scalars for the trainer's own log and for trackers; one that does not exist is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loopscope.trace import LossComponents

Row = Mapping[str, object]


def of_loss(loss: LossComponents) -> dict[str, float]:
    """`loss/task`, `loss/total`, `moe/lb_loss`."""
    return {
        "loss/task": float(loss.task_loss),
        "loss/total": float(loss.total_loss),
        "moe/lb_loss": float(loss.lb_loss),
    }


def of_trace(tables: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """`moe/*` over all router rows and `loop/*` of the last loop step.

    `moe/maxvio_max` and `moe/maxvio_pos` are the worst visit and its depth, `moe/dead` the sum over visits,
    `moe/load_entropy_min` the least even visit, `moe/z_mean` the mean over visits, `moe/logit_abs_max` the
    largest. `loop/*_last` belong to the deepest `step_boundary` pair and the deepest loop visit.
    """
    router = tables.get("router", ())
    found: dict[str, float] = {}
    worst = max(_pairs(router, "maxvio_count"), default=None)
    if worst is not None:
        found["moe/maxvio_max"], found["moe/maxvio_pos"] = worst
    if dead := _values(router, "dead_experts"):
        found["moe/dead"] = sum(dead)
    if entropies := _values(router, "load_entropy_ratio"):
        found["moe/load_entropy_min"] = min(entropies)
    if z_means := _values(router, "z_mean"):
        found["moe/z_mean"] = sum(z_means) / len(z_means)
    if largest := _values(router, "logit_abs_max"):
        found["moe/logit_abs_max"] = max(largest)
    found |= _of_loop(tables)
    return found


def of_probe(rows: Iterable[Row], overlaps: Sequence[float]) -> dict[str, float]:
    """`probe/loss` over the whole corpus, and `probe/overlap_mean` over the pairs of loop steps that ran."""
    found = {}
    whole = [row["loss_mean"] for row in rows if row["stratum_kind"] == "all"]
    if whole and isinstance(whole[0], float):
        found["probe/loss"] = whole[0]
    if overlaps:
        found["probe/overlap_mean"] = sum(overlaps) / len(overlaps)
    return found


def _of_loop(tables: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    found = {}
    boundaries = [row for row in tables.get("transition", ()) if row["kind"] == "step_boundary"]
    if boundaries:
        last = max(boundaries, key=lambda row: _number(row["to_pos"]))
        for name in ("relative_delta", "growth"):
            if (value := last.get(name)) is not None:
                found[f"loop/{name}_last"] = _number(value)
    visits = [row for row in tables.get("residual", ()) if row["block"] == "loop"]
    if visits:
        last = max(visits, key=lambda row: _number(row["unrolled_pos"]))
        if (value := last.get("token_correlation")) is not None:
            found["loop/token_corr_last"] = _number(value)
    return found


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [_number(row[name]) for row in rows if row.get(name) is not None]


def _pairs(rows: Iterable[Row], name: str) -> list[tuple[float, float]]:
    return [(_number(row[name]), _number(row["unrolled_pos"])) for row in rows if row.get(name) is not None]


def _number(value: object) -> float:
    assert isinstance(value, int | float), value
    return float(value)
