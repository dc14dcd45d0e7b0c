"""The support table: which settings a (task, backend) pair does not honour. Declared and reviewed, never inferred.

Inference does not find such gaps: import reachability finds none, reading one module invents some, a dry run stops
too early. A pair without a review reports nothing rather than guessing. Adding a gap is one line here.
tests/capture/test_capture_support.py compares it with what the code reads.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from loopscope.capture.errors import PlanError
from loopscope.capture.settings import RunSettings
from loopscope.errors import UnsupportedError

_LOG = logging.getLogger("loopscope")

Status = Literal["ignored", "rejected"]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SupportEntry:
    """One gap."""

    field: str
    """Name of a field of `RunSettings`."""
    status: Status
    """"ignored": it changes nothing; "rejected": the run is stopped."""
    reason: str
    """Why, and what to do."""
    reads: bool = False
    """True where the pair's own code reads the field, to refuse or to half-honour it."""

    def __post_init__(self) -> None:
        if self.field not in RunSettings.names():
            raise PlanError(f"support table: {self.field!r} is no field of RunSettings.")
        if self.status not in get_args(Status):
            raise PlanError(
                f"support table: {self.field} has status {self.status!r}, expected ignored or rejected."
            )


_PROBE = SupportEntry(
    "probe_every",
    "ignored",
    "no corpus is run on a schedule; call loopscope.run_probe_forward where it is wanted",
)
_NORM = SupportEntry(
    "grad_norm", "ignored", "hooks on a forward do not see gradients; pass grad_norm to log_loss()"
)
_SHARDED = (
    SupportEntry("pipeline_parallel", "rejected", "a rank has some layers only, so depth cannot be counted"),
    SupportEntry("tensor_parallel", "rejected", "router and block outputs have different placements"),
    SupportEntry("context_parallel", "rejected", "statistics of a sequence would be partial"),
    SupportEntry("cuda_graphs", "rejected", "a replay runs no Python, so nothing would be recorded"),
    SupportEntry("full_dtensor", "rejected", "traced tensors would hold the global batch on every rank"),
    SupportEntry("expert_parallel", "rejected", "not covered by a test yet"),
)
_ONE_PROCESS = tuple(
    SupportEntry(field, "rejected", "one process runs the whole model")
    for field in (
        "data_parallel", "pipeline_parallel", "tensor_parallel", "context_parallel", "expert_parallel", "full_dtensor"
    )
)  # fmt: skip
_MLX = (
    _PROBE,
    _NORM,
    *_ONE_PROCESS,
    SupportEntry(
        "compile", "rejected", "arrays cannot leave mx.compile; compile nothing around a traced forward"
    ),
    SupportEntry("cuda_graphs", "ignored", "mlx has none"),
    SupportEntry("recompute", "ignored", "nothing records in a recomputation; it changes nothing here"),
    SupportEntry("loss_rows", "ignored", "the model returns logits; call log_loss() where the loss is known"),
)
_TORCH = (_PROBE, _NORM, *_SHARDED)
_BY_HAND = SupportEntry(
    "loss_rows", "ignored", "a forward's output says nothing of the loss; call log_loss() where it is known"
)
_NO_LOSS = tuple(
    SupportEntry(field, "ignored", "a probe trains nothing") for field in ("loss_rows", "recompute")
)
_COUNTED = SupportEntry(
    "num_microbatches", "ignored", "a probe trains nothing; the counter it sets stands still", reads=True
)
_NO_STEPS = SupportEntry("num_microbatches", "ignored", "a probe trains nothing")

SUPPORT: Mapping[Pair, tuple[SupportEntry, ...]] = MappingProxyType(
    {
        ("pretrain", "torchtitan"): _SHARDED,
        ("sft", "torchtitan"): _SHARDED,
        ("probe", "torchtitan"): (*_SHARDED, *_NO_LOSS, _NO_STEPS),
        ("pretrain", "torch"): (*_TORCH, _BY_HAND),
        ("sft", "torch"): (*_TORCH, _BY_HAND),
        ("probe", "torch"): (*_TORCH, *_NO_LOSS, _COUNTED),
        ("pretrain", "transformers"): _TORCH,
        ("sft", "transformers"): _TORCH,
        ("probe", "transformers"): (*_TORCH, *_NO_LOSS, _COUNTED),
        ("pretrain", "mlx"): _MLX,
        ("sft", "mlx"): _MLX,
    }
)
"""(task, backend) → declared gaps."""


def gaps(task: str, backend: str) -> tuple[SupportEntry, ...]:
    """Every declared gap of a pair; empty where it was not reviewed."""
    return SUPPORT.get((task, backend), ())


def is_reviewed(task: str, backend: str) -> bool:
    """True where the pair was reviewed; without a review nothing is claimed about it."""
    return (task, backend) in SUPPORT


def check_config(settings: RunSettings, task: str, backend: str) -> list[SupportEntry]:
    """The gaps of the pair for fields that were really set."""
    return [entry for entry in gaps(task, backend) if settings.asks_for(entry.field)]


def preflight(settings: RunSettings, task: str, backend: str) -> list[SupportEntry]:
    """Log the gaps of this run, and stop it where one is rejected.

    Raises:
        UnsupportedError: names every rejected setting and why.
    """
    found = check_config(settings, task, backend)
    for entry in found:
        _LOG.warning(
            "%s on %s: %s=%r is %s: %s",
            task, backend, entry.field, getattr(settings, entry.field), entry.status, entry.reason,
        )  # fmt: skip
    if rejected := [entry for entry in found if entry.status == "rejected"]:
        raise UnsupportedError(
            f"{task} on {backend} does not support "
            + "; ".join(
                f"{entry.field}={getattr(settings, entry.field)!r}: {entry.reason}" for entry in rejected
            )
            + ". `loopscope support` lists every such setting."
        )
    return found
