"""What every adapter of a torch model shares: hooks, training, sharding facts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from loopscope.capture.adapter import LossParts
from loopscope.capture.capabilities import BackendSupport
from loopscope.capture.errors import CoverageError
from loopscope.capture.hooks import (
    RootHook,
    has_compiled,
    listening,
    plain_modules,
    runs_inside_compiled_code,
)
from loopscope.capture.plan import resolve_plan
from loopscope.capture.plan_support import PlanSupport
from loopscope.capture.spec import CapturePlan
from loopscope.capture.visits import expected_visits
from loopscope.capture.window import Window
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.trace import VisitSpec

After = Callable[[tuple[Any, ...], Mapping[str, Any], Any, bool], None]

_ORDER = (
    "loopscope's hook on the model's forward must run eagerly. Attach to the result of torch.compile(model), or "
    "compile the blocks (block.compile()) instead of the whole model with fullgraph=True"
)


class TorchModelAdapter:
    """Hooks on a torch.nn.Module by capture plan. Subclasses derive the plan."""

    objective: tuple[str, ...] = ()
    """Numbers of the objective that a forward's output tells."""

    def __init__(
        self, model: nn.Module, *, overrides: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"got {type(model).__name__}, expected a torch.nn.Module.")
        self.model = model
        self._take(**options)
        self.plan = resolve_plan(self.derive(), overrides, plain_modules(model))
        self.check_plan()

    def _take(self, *, valid: Callable[..., Any] | None = None) -> None:
        self._valid = valid

    def derive(self) -> CapturePlan:
        """The plan before the user's overrides."""
        raise NotImplementedError

    def check_plan(self) -> None:
        """Raise where the plan would record nothing."""
        if not self.plan.blocks():
            raise CoverageError(
                f"nothing of {type(self.model).__name__} would be captured: no boundary gives visits. "
                "Give a plan with at least one block: {'blocks.*': {tensors: {residual: output}, placements: {}, "
                "merge: sum}}."
            )

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """See `Adapter`."""
        return expected_visits(self.plan)

    def settings(self) -> Mapping[str, Any]:
        """What the model shows of how it is run."""
        found: dict[str, Any] = {}
        if has_compiled(self.model):
            found["compile"] = True
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        sharded = () if fsdp is None else fsdp.FSDPModule
        if any(
            isinstance(module, (sharded, nn.parallel.DistributedDataParallel))
            for module in self.model.modules()
        ):
            found["data_parallel"] = True
        if any(_tensor_parallel(parameter) for parameter in self.model.parameters()):
            found["tensor_parallel"] = True
        return found

    def backend_support(self) -> BackendSupport:
        """See `Adapter`."""
        return PlanSupport(self.plan, objective=self.objective)

    def module(self, name: str) -> nn.Module:
        """See `Adapter`."""
        return plain_modules(self.model)[name]

    def listening(self) -> AbstractContextManager[Window]:
        """See `Adapter`.

        Raises:
            UnsupportedError: the model was compiled as a whole after it was attached: some of its forwards would run
                hooks and others not.
        """
        if runs_inside_compiled_code():
            raise UnsupportedError(
                "the model was compiled as a whole after it was attached. Compile first and attach to the result: "
                "model = torch.compile(model); loopscope.attach(model, ...). Blocks may be compiled before or after."
            )
        return listening(self.model, self.plan)

    def install(self, before: Callable[[], None], after: After) -> Callable[[], None]:
        """See `Adapter`.

        Raises:
            UnsupportedError: the whole model was compiled in place, which no later hook can see.
        """
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                "the model was compiled in place (model.compile()): its graph runs no hook. Compile with "
                "model = torch.compile(model) and attach to the result, or compile the blocks: block.compile()."
            )

        def opened(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            before()

        def closed(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            # Called without an output where the forward raised (always_call).
            after(args, kwargs, output, output is None and sys.exc_info()[0] is not None)

        disable: Any = torch.compiler.disable
        handles = (
            self.model.register_forward_pre_hook(
                RootHook(disable(opened, reason=_ORDER)), with_kwargs=True, prepend=True
            ),
            self.model.register_forward_hook(
                RootHook(disable(closed, reason=_ORDER)), with_kwargs=True, always_call=True
            ),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def is_training(self) -> bool:
        """True in training mode with gradients."""
        return bool(self.model.training) and torch.is_grad_enabled()

    def valid(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The mask of the user's own function, where one was given."""
        return None if self._valid is None else self._valid(args, kwargs)

    def losses(self, kwargs: Mapping[str, Any], output: Any) -> LossParts | None:
        """A plain model's output says nothing of the loss."""
        return None


def _tensor_parallel(parameter: Any) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return any(name == "tp" for name in names)
