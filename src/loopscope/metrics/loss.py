"""The `loss` table: the components of one step, and whether they add up to what backward ran on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

CLOSURE_TOLERANCE = 1e-4
"""|closure_error| above this times max(1, |total|) is a health event."""


_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class FinishedLoss:
    """The metric columns of one `loss` row."""

    columns: dict[str, float | int | str | None]
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
    absent: Mapping[str, str] = _NOTHING,
) -> FinishedLoss:
    """Columns of one optimizer step.

    ``closure_error = total − (task + lb_factor·lb + z_factor·z + other)``. `total_loss` must come from the
    tensor that backward ran on, its scaling undone; taken from the components the check would be a tautology. Where
    one of them is made from the others, say so in `absent` (column → why it is null): "closure_error" among them.

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
    columns: dict[str, float | int | str | None] = {}
    nulls: dict[str, str] = {}
    for name, value in given.items():
        columns[name] = None
        if name in absent:
            nulls[name] = f"absent:{absent[name]}"
        elif value is None:
            nulls[name] = f"absent:{_WHY_ABSENT[name]}"
        elif not math.isfinite(value):
            nulls[name] = "nonfinite"
        else:
            columns[name] = int(value) if name == "num_target_tokens" else float(value) + 0.0
    parts = task_loss + lb_loss_factor * lb_loss + z_loss_factor * z_loss + (other_loss or 0.0)
    closure = total_loss - parts
    finite = math.isfinite(closure)
    columns["closure_error"] = closure + 0.0 if finite and "closure_error" not in absent else None
    bad = [name for name, reason in nulls.items() if reason == "nonfinite"]
    columns["nonfinite_fields"] = ",".join(bad) or None
    if "closure_error" in absent:
        nulls["closure_error"] = f"absent:{absent['closure_error']}"
    elif not finite:
        nulls["closure_error"] = "nonfinite"
    # nonfinite_fields says that nothing was wrong by being null; that needs no reason.
    violated = columns["closure_error"] is not None and abs(closure) > CLOSURE_TOLERANCE * max(
        1.0, abs(total_loss)
    )
    return FinishedLoss(columns, nulls, violated)


_WHY_ABSENT = {
    "other_loss": "no further term declared",
    "task_loss_sum": "not handed over",
    "num_target_tokens": "not handed over",
    "grad_norm": "not known",
    "lr": "not known",
}
