"""The `loss` row of one optimizer step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loopscope.collect import health
from loopscope.collect.context import RowDict
from loopscope.collect.rows import reasons
from loopscope.errors import TraceError
from loopscope.metrics import CLOSURE_TOLERANCE, finish_loss
from loopscope.trace import LossComponents


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A step's loss on the host, merged over ranks; None where something is not known."""

    step: int
    loss: LossComponents
    grad_norm: float | None = None
    """Norm before clipping."""
    lr: float | None = None
    """Learning rate of the update."""
    task_loss_sum: float | None = None
    """Summed cross-entropy over the target tokens, in nats."""
    num_target_tokens: int | None = None
    """Tokens with a target."""
    other_loss: float | None = None
    """Further terms of the objective, already weighted."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Column that is null whatever stands in `loss` → why."""


def check_step_order(step: int, last_step: int | None) -> None:
    """Raise TraceError where a loss comes for a step at or before the last one."""
    if last_step is not None and step <= last_step:
        raise TraceError(
            f"on_metrics_step got step {step} after step {last_step}, expected steps in rising order, each "
            "once. Values may come some steps late, but with the step they belong to and in its order."
        )


def loss_row(of: StepLoss) -> tuple[RowDict, list[RowDict]]:
    """The row without run-level keys, and the health rows it calls for (`closure`, `nonfinite_loss`)."""
    loss = of.loss
    finished = finish_loss(
        task_loss=loss.task_loss,
        lb_loss=loss.lb_loss,
        lb_loss_factor=loss.lb_loss_factor,
        z_loss=loss.z_loss,
        z_loss_factor=loss.z_loss_factor,
        total_loss=loss.total_loss,
        other_loss=of.other_loss,
        task_loss_sum=of.task_loss_sum,
        num_target_tokens=of.num_target_tokens,
        grad_norm=of.grad_norm,
        lr=of.lr,
        absent=of.absent,
    )
    events = []
    closure = finished.columns["closure_error"]
    if finished.closure_violated and isinstance(closure, float):
        detail = (
            f"total_loss {loss.total_loss:.6g} differs from the sum of its parts by {closure:.6g}, more than "
            f"{CLOSURE_TOLERANCE:g} of it: a term was added twice, or not at all, or with another factor"
        )
        events.append(health.event("closure", "critical", value=closure, detail=detail))
    bad = finished.columns["nonfinite_fields"]
    if isinstance(bad, str):
        count = bad.count(",") + 1
        events.append(health.event("nonfinite_loss", "critical", count=count, detail=bad))
    return {**finished.columns, "null_reasons": reasons(finished.nulls)}, events
