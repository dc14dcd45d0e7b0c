"""Old checkpoints whose own model code knows a loop alone: neither head nor tail, and the old TracePoint."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from loopscope.errors import ConfigError, ProbeError
from loopscope.trace import TraceMeta, TracePoint, legacy_trace_point_factory


class _Counting:
    """The legacy factory under the old class's name; notes how deep the loop went."""

    def __init__(self, num_layers_in_stack: int) -> None:
        self._factory = legacy_trace_point_factory(num_layers_in_stack)
        self.num_stacks = self.num_experts = self.top_k = 0

    def __call__(self, **fields: Any) -> TracePoint:
        point = self._factory(**fields)
        self.num_stacks = max(self.num_stacks, point.loop_step + 1)
        self.num_experts, self.top_k = point.num_experts, point.top_k
        return point

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, TracePoint)


class LegacyModel(nn.Module):
    """An old model with a `trace_meta` that was counted by its loop."""

    def __init__(self, model: nn.Module, counted: _Counting, num_layers_in_stack: int) -> None:
        super().__init__()
        self.model = model
        self._counted, self._num_layers = counted, num_layers_in_stack

    def forward(self, ids_BS: Tensor) -> Any:
        """What the old model returns."""
        return self.model(ids_BS)

    def expected_visits(self) -> tuple[()]:
        """Old code promises nothing; coverage then has no ratio."""
        return ()

    def trace_meta(self) -> TraceMeta:
        """Of the last forward."""
        return TraceMeta(
            num_stacks=max(1, self._counted.num_stacks),
            num_layers_in_stack=self._num_layers,
            num_experts=self._counted.num_experts,
            num_active=self._counted.top_k,
        )


def load_legacy(code: str, checkpoint: Path, num_layers_in_stack: int) -> LegacyModel:
    """The model of an old checkpoint, built by its own code.

    Args:
        code: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``; the function takes the checkpoint's path and returns the
            model with its parameters. The name `TracePoint` in that module is replaced by the legacy factory.
        checkpoint: handed to the function.
        num_layers_in_stack: L of the checkpoint's stack.

    Raises:
        ConfigError: the code cannot be found or imported, or the stack has no layer.
        ProbeError: it has no TracePoint to replace, fails, or returns no module.
    """
    place, _, name = code.rpartition(":")
    if not place or not name:
        raise ConfigError(f"the legacy code is {code!r}, expected MODULE:FUNCTION or FILE.py:FUNCTION")
    module = _import(place)
    if not callable(build := getattr(module, name, None)):
        raise ConfigError(f"{place} has no function {name!r}; expected one that takes the checkpoint's path")
    if not hasattr(module, "TracePoint"):
        raise ProbeError(
            f"{place} has no name TracePoint, expected old code that builds TracePoint(loop_step=, layer_idx=, ...). "
            "Name the module whose code records the visits."
        )
    if num_layers_in_stack < 1:
        raise ConfigError(f"the stack has {num_layers_in_stack} layers, expected at least 1")
    counted = _Counting(num_layers_in_stack)
    module.TracePoint = counted  # type: ignore[attr-defined]
    try:
        model = build(checkpoint)
    except Exception as error:
        raise ProbeError(
            f"{code} failed on {checkpoint} ({type(error).__name__}: {error}), expected a model with the checkpoint's "
            "parameters. Is it this code's checkpoint?"
        ) from error
    if not isinstance(model, nn.Module):
        raise ProbeError(
            f"{code} returned {type(model).__name__}, expected a torch module with its parameters"
        )
    return LegacyModel(model, counted, num_layers_in_stack)


def _import(place: str) -> ModuleType:
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not path.is_file():
        raise ConfigError(f"there is no file {path}, expected the old model's code")
    name = f"loopscope_legacy_{path.stem}" if is_file else place
    try:
        if not is_file:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise ConfigError(
            f"cannot import {place} ({type(error).__name__}: {error}), expected an importable module. Try it with "
            "`python`."
        ) from error
    return module
