"""Hooks on a torch model that exist only while a traced forward runs.

Between traced forwards the model carries one pair of hooks, on its root. Hence nothing is in a compiled graph,
nothing records in activation recompute, and an untraced step costs two Python calls.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from loopscope.capture.errors import CoverageError
from loopscope.capture.local_variables import LocalVariables, local_names
from loopscope.capture.source import Call
from loopscope.capture.spec import CapturePlan
from loopscope.capture.visits import VisitPlaces
from loopscope.capture.window import Boundary, Window, boundaries_of

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Path components that compile, recompute and sharding wrappers add."""


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name without wrappers → module; of a wrapper and what it wraps, the inner one."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in inner.named_modules(remove_duplicate=False)
    }


@contextmanager
def listening(model: nn.Module, plan: CapturePlan, places: VisitPlaces) -> Iterator[Window]:
    """Hooks on every boundary of `plan` while the body runs; they are gone afterwards, also when it raises.

    Compiled modules run eagerly meanwhile, since a compiled graph runs no hook that came after it.

    Raises:
        CoverageError: a module of the plan is no longer there.
    """
    modules = plain_modules(model)
    window = Window(plan, places)
    with ExitStack() as stack:
        for name, boundaries in _by_module(boundaries_of(plan), modules).items():
            if name not in modules:
                raise CoverageError(
                    f"the model has no module {name!r} any more; it was there when the plan was made. Change the "
                    "structure of the model before attaching."
                )
            module, local = modules[name], None
            if names := local_names(boundaries[0].sources.values()):
                local = LocalVariables(module, module.forward, names)
                stack.callback(_watch(module, local))
            stack.callback(_record(module, window, boundaries, local))
        if has_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield window


def has_compiled(model: nn.Module) -> bool:
    """True where the model, or a part of it, is compiled."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return any(
        isinstance(module, kind) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def runs_inside_compiled_code() -> bool:
    """True where a compiled function is on the stack: the model was compiled after it was attached."""
    frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    above: FrameType | None = None if frame is None else sys._getframe(1)
    while above is not None:
        if above.f_code.co_name == "compile_wrapper" and above.f_code.co_filename == frame.__file__:
            return True
        above = above.f_back
    return False


def _by_module(
    boundaries: Mapping[str, Boundary], modules: Mapping[str, nn.Module]
) -> dict[str, list[Boundary]]:
    """First name of each module → its boundaries: a router that several layers share has one for each of them."""
    first: dict[int, str] = {}
    found: dict[str, list[Boundary]] = {}
    for name, boundary in boundaries.items():
        own = first.setdefault(id(modules[name]), name) if name in modules else name
        found.setdefault(own, []).append(boundary)
    return found


def in_backward() -> bool:
    """True while autograd runs: a forward then is activation recompute."""
    return torch._C._current_graph_task_id() != -1


def has_failed(output: Any) -> bool:
    """Whether a hook that is always called was called since its module raised: without an output."""
    return output is None and sys.exc_info()[0] is not None


def _record(
    module: nn.Module, window: Window, boundaries: Sequence[Boundary], local: LocalVariables | None
) -> Callable[[], None]:
    """Tell the window of each call of `module`; returns what undoes it."""
    running: list[Boundary] = []

    def began(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append(window.boundary_now(boundaries))
        window.began(running[-1], in_backward=in_backward())

    def ended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        boundary = running.pop()
        if has_failed(output):
            window.failed(boundary)
            return
        with torch.no_grad():
            window.record(boundary, Call(module, args, kwargs, output, local.take() if local else None))

    handles = (
        module.register_forward_pre_hook(began, prepend=True),
        module.register_forward_hook(ended, with_kwargs=True, always_call=True),
    )
    return partial(_remove_all, handles)


def _remove_all(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _watch(module: nn.Module, local: LocalVariables) -> Callable[[], None]:
    """Watch the local variables of each call of `module`; returns what undoes it."""

    def started(module: nn.Module, args: tuple[Any, ...]) -> None:
        local.start()

    def stopped(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        local.stop()

    # Also stopped where the forward raises, and before anything else hears that it has ended.
    handles = (
        module.register_forward_pre_hook(started),
        module.register_forward_hook(stopped, always_call=True, prepend=True),
    )
    return partial(_remove_all, handles)


class RootHook:
    """A hook that is dropped when the model is copied or pickled: the copy has no hooks."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function."""
        self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _nothing() -> Callable[..., None]:
    return nothing
