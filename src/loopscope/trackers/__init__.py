"""Headline scalars, per-visit tables and alerts to the trackers that people already use (W&B, TensorBoard).

::

    rows on their way to the store ── TrackingWriter ──► store, untouched
                                          │ of each step: scalars, table of visits
                                          ▼
                                     GuardedTracker (failures, key budget) ──► one file in `backends/`

A new tracker is one file in `backends/`, or an entry point of the group `loopscope.trackers`.
"""

from loopscope.trackers.budget import KEY_LIMIT, KeyBudget
from loopscope.trackers.guard import GuardedTracker
from loopscope.trackers.protocol import StepValues, Tracker, TrackerStart, VisitTable
from loopscope.trackers.registry import check_trackers, known_trackers, start_trackers
from loopscope.trackers.writer import TrackerObserver, TrackingWriter

__all__ = [
    "KEY_LIMIT",
    "GuardedTracker",
    "KeyBudget",
    "StepValues",
    "Tracker",
    "TrackerObserver",
    "TrackerStart",
    "TrackingWriter",
    "VisitTable",
    "check_trackers",
    "known_trackers",
    "start_trackers",
]
