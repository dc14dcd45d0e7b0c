"""Which trackers there are, one file each in `backends/` and those that other packages register; and their start."""

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Literal, Protocol, cast

from loopscope.errors import ConfigError, UnsupportedError
from loopscope.trackers import backends
from loopscope.trackers.budget import KEY_LIMIT
from loopscope.trackers.guard import GuardedTracker, Tell
from loopscope.trackers.protocol import Tracker, TrackerStart

OF_THE_TRAINER = 23
"""Keys that are left to a trainer in a tracker that it shares: torchtitan has 17, and 6 of its validation."""

ENTRY_POINTS = "loopscope.trackers"
"""Entry-point group of third parties: tracker name → a module like those in `backends/`."""


class Backend(Protocol):
    """What a file of `backends/` has, and what another package registers. Optional: `PACKAGES`, the modules that it
    imports; `INSTALL`, what to do when one is missing."""

    def start(self, begin: TrackerStart, /) -> Tracker:
        """Start the tracker."""
        ...


@cache
def known_trackers() -> tuple[str, ...]:
    """Names of all trackers, sorted; none is imported."""
    return tuple(sorted({*_built_in(), *_registered()}))


def backend(name: str) -> Backend:
    """A tracker by name; its file is imported, what it writes to is not.

    Raises:
        ConfigError: there is no such tracker, or what is registered under its name is none.
    """
    if name in _built_in():
        return cast(Backend, import_module(f"{backends.__name__}.{name}"))
    point = _registered().get(name)
    if point is None:
        raise ConfigError(
            f"trackers names {name!r}, expected some of {', '.join(known_trackers())}. Another package can register a "
            f"tracker under the entry point group {ENTRY_POINTS}."
        )
    module: Backend = point.load()
    if not callable(getattr(module, "start", None)):
        raise ConfigError(
            f"the tracker {name!r} is registered as {point.value}, which has no start(TrackerStart); expected a "
            "module, or an object, that has it."
        )
    return module


def check_trackers(names: Iterable[str]) -> tuple[str, ...]:
    """The names, once each and in their order, when every one of them could be started.

    Raises:
        ConfigError: an unknown tracker, or something else than names.
        UnsupportedError: a tracker's package is not installed; says what to install.
    """
    given = (names,) if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"trackers is {names!r}, expected a tuple of names, such as ('wandb',)")
    unique = tuple(dict.fromkeys(given))
    for name in unique:
        found = backend(name)
        if missing := [one for one in getattr(found, "PACKAGES", ()) if not _is_installed(one)]:
            what = getattr(found, "INSTALL", f"pip install {' '.join(missing)}")
            raise UnsupportedError(
                f"trackers names {name!r}, but {' and '.join(missing)} cannot be imported; expected it to be "
                f"installed. Run: {what}"
            )
    return unique


def start_trackers(
    names: Iterable[str],
    start: TrackerStart,
    *,
    shared: Mapping[str, Any],
    on_error: Literal["record", "raise"],
    tell: Tell,
) -> list[GuardedTracker]:
    """Start each tracker; one that fails is told and off, or raises under "raise".

    Args:
        names: checked by `check_trackers`.
        start: what all of them know.
        shared: tracker name → what the trainer started and it writes into; an exception where the trainer could
            not start it, which is then told.
        on_error: "record" or "raise".
        tell: writes a health row.
    """
    started = []
    for name in names:
        handle = shared.get(name)
        limit = KEY_LIMIT if handle is None else KEY_LIMIT - OF_THE_TRAINER
        own = partial(_start, name, replace(start, shared=handle))
        guarded = GuardedTracker(name, own, limit=limit, on_error=on_error, tell=tell)
        guarded.start()
        started.append(guarded)
    return started


def _start(name: str, start: TrackerStart) -> Tracker:
    if isinstance(start.shared, Exception):
        raise start.shared
    return backend(name).start(start)


def _is_installed(name: str) -> bool:
    # A folder of that name in the working directory (wandb makes one) looks like a package without an origin.
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _built_in() -> set[str]:
    return {found.name for found in pkgutil.iter_modules(backends.__path__)}


def _registered() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
