"""Starts the trackers of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from loopscope.trackers.budget import KEY_LIMIT
from loopscope.trackers.guard import GuardedTracker, Tell
from loopscope.trackers.protocol import Tracker, TrackerStart
from loopscope.trackers.registry import backend

OF_THE_TRAINER = 23
"""Keys that are left to a trainer in a tracker that it shares: torchtitan has 17, and 6 of its validation."""


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
        own = replace(start, shared=handle, key_limit=limit)
        guarded = GuardedTracker(name, partial(_start, name, own), limit=limit, on_error=on_error, tell=tell)
        guarded.start()
        started.append(guarded)
    return started


def _start(name: str, start: TrackerStart) -> Tracker:
    if isinstance(start.shared, Exception):
        raise start.shared
    return backend(name).start(start)
