"""Who can observe a run: backend first, then task; adapter modules are imported inside the look-up."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from loopscope.capture.frozen import FrozenMapping
from loopscope.capture.nearest import suggestion
from loopscope.errors import ConfigError

TASKS = ("pretrain", "sft", "probe")
ENTRY_POINTS = "loopscope.adapters"
"""Entry-point group of third parties; a name is "backend.task"."""

# backend → task → "module:class". Adding an adapter is a file and a line.
_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "torchtitan": dict.fromkeys(TASKS, "loopscope.integrations.torchtitan.moe_adapter:TorchtitanAdapter"),
    "torch": dict.fromkeys(TASKS, "loopscope.capture.torch_adapter:TorchAdapter"),
    "transformers": dict.fromkeys(TASKS, "loopscope.capture.transformers_adapter:TransformersAdapter"),
    "mlx": dict.fromkeys(("pretrain", "sft"), "loopscope.capture.mlx_adapter:MlxAdapter"),
}


class Adapters(FrozenMapping[str, Any]):
    """Task → adapter class of one backend; read-only. A class is imported when it is asked for."""

    def __init__(self, backend: str, targets: Mapping[str, str]) -> None:
        super().__init__(targets)
        self.backend = backend

    def __getitem__(self, task: str) -> Any:
        return pkgutil.resolve_name(super().__getitem__(task))

    def __contains__(self, task: object) -> bool:
        return task in self._items

    def __repr__(self) -> str:
        return f"Adapters({self.backend!r}, {dict(self._items)})"


@cache
def adapters() -> Mapping[str, Adapters]:
    """Backend → its adapters, those of installed third parties included."""
    targets = {backend: dict(tasks) for backend, tasks in _BUILT_IN.items()}
    for point in entry_points(group=ENTRY_POINTS):
        backend, _, task = point.name.partition(".")
        # What loopscope brings cannot be replaced from outside: its rows are reviewed.
        targets.setdefault(backend, {}).setdefault(task, point.value)
    return MappingProxyType({backend: Adapters(backend, tasks) for backend, tasks in targets.items()})


def resolve_targets(backend: str, task: str | None = None) -> Adapters:
    """The adapters of a backend, imported or not.

    Raises:
        ConfigError: (a ValueError) an unknown backend, or one that does not support `task`.
    """
    if (found := adapters().get(backend)) is None:
        raise ConfigError(
            f"no backend {backend!r}; expected one of {', '.join(adapters())}."
            f"{suggestion(str(backend), adapters())}"
        )
    if task is not None and task not in found:
        full = [name for name, other in adapters().items() if all(known in other for known in TASKS)]
        raise ConfigError(
            f"backend {backend!r} has no adapter for task {task!r}; it supports {', '.join(found)}. "
            f"Every task is supported by {', '.join(full)}."
        )
    return found


def resolve_adapter(task: str, backend: str) -> Any:
    """The adapter class for a task on a backend; called with the model and any keyword arguments of its own.

    Raises:
        ConfigError: (a ValueError) names the backend, the task, the tasks it does support, and the backends with
            full coverage.
        ModuleNotFoundError: the backend's framework is not installed.
    """
    return resolve_targets(backend, task)[task]
