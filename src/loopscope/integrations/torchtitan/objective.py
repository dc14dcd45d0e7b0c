"""The training objective of one microbatch and the loss components of a step, with torchtitan's scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from loopscope.trace import LossComponents


@dataclass(slots=True)
class StepLosses:
    """Detached device scalars of one optimizer step, one entry per microbatch; read once, at its end."""

    task: list[Tensor] = field(default_factory=list)
    """Summed cross-entropy of this rank's targets ÷ the global number of targets."""
    lb: list[Tensor] = field(default_factory=list)
    """Mean over visits of the load-balancing loss."""
    z: list[Tensor] = field(default_factory=list)
    """Mean over visits of the router z-loss."""
    objective: list[Tensor] = field(default_factory=list)
    """The tensor that backward ran on."""
    targets: list[Tensor] = field(default_factory=list)
    """Targets of this rank (labels that are not ignored)."""
    global_targets: Tensor | None = None
    """Targets of all ranks in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxScale:
    """How auxiliary losses enter one microbatch's objective.

    FSDP sums gradients over ranks and accumulation sums them over microbatches, so an equal-weight mean needs
    each term divided by both numbers.
    """

    lb_factor: float
    """Factor of the load-balancing loss."""
    z_factor: float
    """Factor of the router z-loss."""
    num_ranks: int
    """Size of torchtitan's `loss` mesh (dp_replicate × dp_shard × cp)."""
    num_microbatches: int
    """Gradient accumulation steps."""

    def add(self, task: Tensor, lb: Tensor, z: Tensor) -> Tensor:
        """The scalar to run backward on."""
        aux = self.lb_factor * lb + self.z_factor * z
        return task + aux / (self.num_ranks * self.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLosses:
    """This rank's loss components and what is needed to merge them over ranks."""

    components: LossComponents
    """Task loss is this rank's mean over its own targets."""
    task_loss_sum: float
    """Summed cross-entropy of this rank, in nats."""
    num_targets: int
    """Targets of this rank."""


def rank_losses(step: StepLosses, scale: AuxScale) -> RankLosses:
    """Read a step's device scalars and undo torchtitan's scaling.

    ``total_loss`` comes from the tensors that backward ran on, never from the components. Their sum over
    microbatches, times the number of ranks, weighs this rank's task loss by s = ranks · own targets ÷ global
    targets (1 when ranks have equally many); that weight is taken out, so that
    ``total = task + f_lb·lb + f_z·z`` for this rank's own mean. One copy to the host per scalar.
    """
    assert step.global_targets is not None
    num_global = float(step.global_targets.item())
    num_targets = round(_total(step.targets))
    task_sum = _total(step.task) * num_global
    # Without targets the mean does not exist; NaN becomes null with a reason, never 0.
    task = task_sum / num_targets if num_targets else math.nan
    weight = scale.num_ranks * num_targets / num_global if num_global else 0.0
    objective = _total(step.objective) * scale.num_ranks
    return RankLosses(
        components=LossComponents(
            task_loss=task,
            lb_loss=_total(step.lb) / len(step.lb),
            lb_loss_factor=scale.lb_factor,
            z_loss=_total(step.z) / len(step.z),
            z_loss_factor=scale.z_factor,
            total_loss=objective - (weight - 1.0) * task,
        ),
        task_loss_sum=task_sum,
        num_targets=num_targets,
    )


def _total(scalars: list[Tensor]) -> float:
    return sum(float(scalar.item()) for scalar in scalars)
