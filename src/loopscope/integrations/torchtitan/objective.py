"""The training objective of one microbatch and the losses of a step, with torchtitan's scaling."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopscope.collect import DeviceLoss


@dataclass(slots=True)
class StepLosses:
    """Detached device scalars of one optimizer step, one entry per microbatch; summed at its end."""

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


def device_loss(
    step: StepLosses, scale: AuxScale, *, grad_norm: Tensor | None, lr: float | None
) -> DeviceLoss:
    """A step's losses for the collector, still on the device; no value is read.

    ``total_loss`` comes from the tensors that backward ran on, never from the components: the shares of all
    microbatches and ranks add up to the objective, which undoes all scaling.
    """
    assert step.global_targets is not None
    return DeviceLoss(
        task_loss_sum=_sum(step.task) * step.global_targets,
        num_target_tokens=torch.stack(step.targets).sum(),
        lb_loss=_sum(step.lb) / len(step.lb),
        z_loss=_sum(step.z) / len(step.z),
        total_loss=_sum(step.objective),
        lb_loss_factor=scale.lb_factor,
        z_loss_factor=scale.z_factor,
        grad_norm=grad_norm,
        lr=lr,
    )


def _sum(scalars: list[Tensor]) -> Tensor:
    # In float64: the closure check compares this sum with its parts at 1e-4, far above float32 noise of one
    # value, but not of a hundred microbatches.
    return torch.stack(scalars).double().sum()
