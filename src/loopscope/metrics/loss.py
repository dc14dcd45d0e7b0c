"""The `loss` table: the components of one step, and whether they add up to what backward ran on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loopscope.metrics.metric import Kind, Metric, Value

CLOSURE_TOLERANCE = 1e-4
"""|closure_error| above this times max(1, |total|) is a health event."""


@dataclass(frozen=True, slots=True)
class FinishedLoss:
    """The metric columns of one `loss` row."""

    columns: dict[str, Value]
    """Column → value."""
    nulls: dict[str, str]
    """Column → reason, for the columns that are null."""
    closure_violated: bool
    """An auxiliary term was added twice, or not at all, or another way than its factor says."""


def finish_loss(
    *,
    task_loss: float,
    lb_loss: float,
    lb_loss_factor: float,
    z_loss: float,
    z_loss_factor: float,
    total_loss: float,
    other_loss: float | None = None,
    task_loss_sum: float | None = None,
    num_target_tokens: int | None = None,
    grad_norm: float | None = None,
    lr: float | None = None,
) -> FinishedLoss:
    """Columns of one optimizer step.

    ``closure_error = total − (task + lb_factor·lb + z_factor·z + other)``. `total_loss` must come from the
    tensor that backward ran on, its scaling undone; taken from the components the check would be a tautology.

    >>> finish_loss(task_loss=2.0, lb_loss=1.5, lb_loss_factor=0.01, z_loss=0.0, z_loss_factor=0.0,
    ...             total_loss=2.03).closure_violated
    True
    """
    given: dict[str, float | int | None] = {
        "task_loss": task_loss,
        "lb_loss": lb_loss,
        "lb_loss_factor": lb_loss_factor,
        "z_loss": z_loss,
        "z_loss_factor": z_loss_factor,
        "total_loss": total_loss,
        "other_loss": other_loss,
        "task_loss_sum": task_loss_sum,
        "num_target_tokens": num_target_tokens,
        "grad_norm": grad_norm,
        "lr": lr,
    }
    columns: dict[str, Value] = {}
    nulls: dict[str, str] = {}
    for name, value in given.items():
        columns[name] = None
        if value is None:
            nulls[name] = f"absent:{_WHY_ABSENT[name]}"
        elif not math.isfinite(value):
            nulls[name] = "nonfinite"
        else:
            columns[name] = int(value) if name == "num_target_tokens" else float(value) + 0.0
    parts = task_loss + lb_loss_factor * lb_loss + z_loss_factor * z_loss + (other_loss or 0.0)
    closure = total_loss - parts
    finite = math.isfinite(closure)
    columns["closure_error"] = closure + 0.0 if finite else None
    bad = [name for name, reason in nulls.items() if reason == "nonfinite"]
    columns["nonfinite_fields"] = ",".join(bad) or None
    if not finite:
        nulls["closure_error"] = "nonfinite"
    # nonfinite_fields says that nothing was wrong by being null; that needs no reason.
    violated = finite and abs(closure) > CLOSURE_TOLERANCE * max(1.0, abs(total_loss))
    return FinishedLoss(columns, nulls, violated)


_WHY_ABSENT = {
    "other_loss": "no further term declared",
    "task_loss_sum": "not handed over",
    "num_target_tokens": "not handed over",
    "grad_norm": "not known",
    "lr": "not known",
}


def _metric(name: str, formula: str, unit: str, merge: str, null_rule: str, kind: Kind = "float64") -> Metric:
    return Metric(
        name=name,
        table="loss",
        kind=kind,
        formula=formula,
        unit=unit,
        needs=(),
        merge=merge,
        source="the trainer",
        null_rule=null_rule,
    )


_BAD = "not finite: nonfinite"

METRICS = (
    _metric(
        "task_loss", "cross-entropy before any auxiliary term", "nats", "Σ task_loss_sum / Σ tokens", _BAD
    ),
    _metric(
        "lb_loss", "equal-weight mean of E·Σ f_e·P_e over visits, microbatches, ranks", "1", "mean", _BAD
    ),
    _metric("lb_loss_factor", "factor of lb_loss in the total", "1", "constant", _BAD),
    _metric("z_loss", "equal-weight mean of mean z² over visits, microbatches, ranks", "nats²", "mean", _BAD),
    _metric("z_loss_factor", "factor of z_loss in the total", "1", "constant", _BAD),
    _metric("total_loss", "what backward ran on, its scaling undone", "nats", "as task_loss", _BAD),
    _metric(
        "other_loss",
        "further declared terms, already weighted",
        "nats",
        "mean",
        f"none declared: absent; {_BAD}",
    ),
    _metric(
        "task_loss_sum",
        "Σ cross-entropy over target tokens",
        "nats",
        "sum",
        f"not handed over: absent; {_BAD}",
    ),
    _metric("num_target_tokens", "target tokens", "tokens", "sum", "not handed over: absent", "int64"),
    _metric("grad_norm", "norm of the gradient before clipping", "1", "norm", f"not known: absent; {_BAD}"),
    _metric("lr", "learning rate of the step", "1", "constant", f"not known: absent; {_BAD}"),
    _metric(
        "closure_error",
        "total − (task + lb_factor·lb + z_factor·z + other)",
        "nats",
        "mean",
        "a component is not finite: nonfinite",
    ),
    _metric(
        "nonfinite_fields",
        "names of the components that are not finite, comma-separated",
        "names",
        "union",
        "null when all are finite",
        "string",
    ),
)
"""Columns of the `loss` table."""
