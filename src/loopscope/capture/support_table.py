"""The declared gaps of every reviewed pair, and the modules through which each pair reads settings.

Adding a gap is one line here. tests/capture/test_support.py keeps both directions honest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loopscope.capture.support import Pair, SupportEntry

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
)
_EXPERT = SupportEntry("expert_parallel", "rejected", "not covered by a test yet")
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
_TORCH = (_PROBE, _NORM, *_SHARDED, _EXPERT)
_BY_HAND = SupportEntry(
    "loss_rows", "ignored", "a forward's output says nothing of the loss; call log_loss() where it is known"
)
_TITAN = (
    *_SHARDED,
    _EXPERT,
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
        ("pretrain", "torchtitan"): _TITAN,
        ("sft", "torchtitan"): _TITAN,
        ("probe", "torchtitan"): (*_TITAN, *_NO_LOSS, _NO_STEPS),
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

_ATTACH = ("loopscope.session.attach", "loopscope.session.attached", "loopscope.capture.runtime")

READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchtitan": (
            "loopscope.integrations.torchtitan.moe_adapter",
            "loopscope.integrations.torchtitan.support",
            "loopscope.capture.runtime",
        ),
        "torch": (*_ATTACH, "loopscope.capture.torch_adapter"),
        "transformers": (*_ATTACH, "loopscope.capture.transformers_adapter"),
        "mlx": (*_ATTACH, "loopscope.capture.mlx_adapter"),
    }
)
"""Backend → the modules through which it reads settings: the adapter and its helpers."""
