"""What every adapter of a torch model shares: hooks, training, sharding facts."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from loopscope.capture.errors import CoverageError
from loopscope.capture.glob_gaps import left_out
from loopscope.capture.hooks import (
    RootHook,
    has_compiled,
    has_failed,
    in_backward,
    listening,
    plain_modules,
    runs_inside_compiled_code,
)
from loopscope.capture.local_variables import check_local_names, local_names
from loopscope.capture.nearest import shortened
from loopscope.capture.padding import PaddingReader
from loopscope.capture.plan_adapter import PlanAdapter
from loopscope.capture.window import Window
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.trace import TracePoint

After = Callable[[tuple[Any, ...], Mapping[str, Any], Any, bool], None]

_ORDER = (
    "loopscope's hook on the model's forward must run eagerly. Attach to the result of torch.compile(model), or "
    "compile the blocks (block.compile()) instead of the whole model with fullgraph=True"
)


class TorchModelAdapter(PlanAdapter):
    """Hooks on a torch.nn.Module by capture plan. Subclasses derive the plan."""

    model: nn.Module

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"got {type(model).__name__}, expected a torch.nn.Module.")
        super().__init__(model, **options)
        self._padding = PaddingReader()
        self.check_plan()
        modules = self.modules()
        self._num_modules, self._left_out = len(modules), left_out(self.plan.blocks(), modules)

    def modules(self) -> dict[str, nn.Module]:
        """Name without wrappers → module."""
        return plain_modules(self.model)

    def check_plan(self) -> None:
        """Raise where the plan would record nothing, or names a variable that a module's code does not have."""
        modules = self.modules()
        for name, spec in self.plan.items():
            where = f"plan[{name!r}]"
            check_local_names(local_names(spec.sources(where).values()), modules[name].forward, where)
        if not self.plan.blocks():
            raise CoverageError(
                f"nothing of {type(self.model).__name__} would be captured: no boundary gives visits. "
                "Give a plan with at least one block: {'blocks.*': {tensors: {residual: output}, placements: {}, "
                "merge: sum}}."
            )

    def settings(self) -> Mapping[str, Any]:
        """What the model shows of how it is run."""
        sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        spread = (sharded, nn.parallel.DistributedDataParallel)
        shown = {
            "compile": has_compiled(self.model),
            "data_parallel": any(isinstance(module, spread) for module in self.model.modules()),
            "tensor_parallel": any(_tensor_parallel(parameter) for parameter in self.model.parameters()),
        }
        return {name: True for name, seen in shown.items() if seen}

    def listening(self) -> AbstractContextManager[Any]:
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
        return self._listening()

    @contextmanager
    def _listening(self) -> Iterator[Window]:
        self._check_structure(self.modules())
        with (
            listening(self.model, self.plan, self.places) as window,  # first: it names a module that is gone
            self._padding.listening(self.modules(), self.plan.blocks()),
        ):
            yield window

    def _check_structure(self, modules: Mapping[str, nn.Module]) -> None:
        if len(modules) == self._num_modules:
            return
        if added := sorted(left_out(self.plan.blocks(), modules) - self._left_out):
            raise CoverageError(
                f"{shortened(added)} came to the model beside the blocks that are captured, after it was attached. "
                "Change the structure of the model before attaching."
            )

    def valid(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        points: Sequence[TracePoint],
        blocks: Sequence[str],
    ) -> Any:
        """The mask of the user's own function, else what the forward was given by name (see `PaddingReader`)."""
        if self._valid is not None:
            return super().valid(args, kwargs, points, blocks)
        return self._padding.valid(self.modules()[""], args, kwargs, points, blocks)

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
            after(args, kwargs, output, has_failed(output))

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

    def in_backward(self) -> bool:
        """True while autograd runs: a forward then is activation recompute."""
        return in_backward()

    def ignored(self) -> str:
        """Eval mode, or gradients that are off."""
        return "without gradients" if self.model.training else "in eval mode (model.eval())"


def _tensor_parallel(parameter: Any) -> bool:
    return "tp" in (getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ())
