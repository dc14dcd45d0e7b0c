"""What this version cannot observe rightly is refused before training starts, by the flag that asks for it."""

from typing import Any

from torch import nn
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from loopscope.capture.settings import RunSettings
from loopscope.capture.support import SupportEntry, preflight
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.integrations.torchtitan.trackers import tracker_names

# kind of parallelism → why its tensors would be reduced wrongly today
_PARALLEL = {
    "pipeline_parallel": (
        "pipeline stages split `layers` once each, so a shared stack that is run R times does not map to them"
    ),
    "tensor_parallel": "a block returns a tuple, and torchtitan redistributes tensor outputs only",
    "context_parallel": "sequences are sharded, and statistics over tokens of one sequence would be partial",
    "expert_parallel": "its routed tokens are dispatched between ranks in ways that no test here covers",
}


def check_config(config: Any) -> None:
    """Refuse settings of a torchtitan ``Trainer.Config`` that are not supported.

    Raises:
        UnsupportedError: names the flag, what it is set to, and what to set.
        ConfigError: a value that can never work.
    """
    for name, reason in _PARALLEL.items():
        if (degree := getattr(config.parallelism, f"{name}_degree")) > 1:
            flag = f"--parallelism.{name.replace('_', '-')}-degree"
            raise UnsupportedError(f"{flag} is {degree}, expected 1: {reason}. Set {flag} 1.")
    for is_set, message in (
        (
            config.parallelism.spmd_backend == "full_dtensor",
            "--parallelism.spmd-backend is full_dtensor, expected spmd_types or partial_dtensor: traced tensors "
            "would be DTensors of the global batch. Set --parallelism.spmd-backend spmd_types.",
        ),
        (
            not config.training.disable_cuda_graphs,
            "CUDA graphs are on (--training.no-disable-cuda-graphs), expected them off: a replay runs no Python, "
            "so nothing would be recorded. Set --training.disable-cuda-graphs.",
        ),
        (
            config.debug.spmd_typechecking,
            "--debug.spmd-typechecking is on, expected off: it refuses the partial token counts of the "
            "load-balancing loss. Set --debug.no-spmd-typechecking.",
        ),
        (
            isinstance(config.activation_checkpoint, MemoryBudgetAC.Config),
            "activation-checkpoint:memory-budget is chosen, expected none, full or selective: the compiler then "
            "decides what is recomputed. Choose one of those.",
        ),
    ):
        if is_set:
            raise UnsupportedError(message)
    if config.training.seq_len < 2:
        raise ConfigError(
            f"--training.seq-len is {config.training.seq_len}, expected >= 2: a sequence needs a token and its target."
        )


def settings_from(trainer: Any) -> RunSettings:
    """What a torchtitan ``Trainer.Config`` asks for; only what differs from its default counts as set."""
    parallelism = trainer.parallelism
    asked = {
        **{name: getattr(parallelism, f"{name}_degree") > 1 for name in _PARALLEL},
        "data_parallel": parallelism.data_parallel_shard_degree not in (0, 1),
        "full_dtensor": parallelism.spmd_backend == "full_dtensor",
        "cuda_graphs": not trainer.training.disable_cuda_graphs,
        "recompute": trainer.activation_checkpoint is not None,
        "compile": trainer.compile.enable,
        "trackers": tracker_names(trainer),
    }
    return RunSettings(**{name: value for name, value in asked.items() if value})


def check_support(trainer: Any) -> list[SupportEntry]:
    """Log the gaps of a ``Trainer.Config`` and stop at a rejected one.

    Raises:
        UnsupportedError: names every rejected setting.
    """
    return preflight(settings_from(trainer), "pretrain", "torchtitan")


def check_model(model: nn.Module) -> None:
    """Refuse a built model that cannot be observed.

    Raises:
        UnsupportedError: the whole model is compiled, so that its outer loop runs no Python.
        ConfigError: the model does not have the trace contract.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            "the whole model is compiled (torch.compile(model) or model.compile()), expected only its blocks: "
            "the outer loop that records must run eagerly. Compile the children of model.layers instead "
            "(--compile.enable --compile.components model does that)."
        )
    if missing := [
        name for name in ("expected_visits", "trace_meta") if not callable(getattr(model, name, None))
    ]:
        raise ConfigError(
            f"{type(model).__name__} has no {' and no '.join(missing)}(); expected a model with the trace contract. "
            "Add both methods and record a TracePoint per visit in ACTIVE_TRACE_SINK (README, 'Your own model')."
        )
