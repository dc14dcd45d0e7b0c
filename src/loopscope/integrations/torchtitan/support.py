"""The settings of a torchtitan run in the words of the support table."""

from __future__ import annotations

from typing import Any

from loopscope.capture.settings import RunSettings
from loopscope.capture.support import preflight
from loopscope.capture.support_table import SupportEntry
from loopscope.integrations.torchtitan.trackers import tracker_names

_DEGREES = {
    "pipeline_parallel": "pipeline_parallel_degree",
    "tensor_parallel": "tensor_parallel_degree",
    "context_parallel": "context_parallel_degree",
    "expert_parallel": "expert_parallel_degree",
}


def settings_from(trainer: Any) -> RunSettings:
    """What a torchtitan ``Trainer.Config`` asks for; only what differs from its default counts as set."""
    found: dict[str, Any] = {
        ours: True for ours, theirs in _DEGREES.items() if getattr(trainer.parallelism, theirs) > 1
    }
    if trainer.parallelism.data_parallel_shard_degree not in (0, 1):
        found["data_parallel"] = True
    if trainer.parallelism.spmd_backend == "full_dtensor":
        found["full_dtensor"] = True
    if not trainer.training.disable_cuda_graphs:
        found["cuda_graphs"] = True
    if trainer.activation_checkpoint is not None:
        found["recompute"] = True
    if trainer.compile.enable:
        found["compile"] = True
    if names := tracker_names(trainer):
        found["trackers"] = names
    return RunSettings(**found)


def check_support(trainer: Any) -> list[SupportEntry]:
    """Log the gaps of a ``Trainer.Config`` and stop at a rejected one.

    Raises:
        UnsupportedError: names every rejected setting.
    """
    return preflight(settings_from(trainer), "pretrain", "torchtitan")
