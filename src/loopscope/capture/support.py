"""The support table: which settings a (task, backend) pair does not honour. Declared and reviewed, never inferred.

Inference does not find such gaps: import reachability finds none, reading one module invents some, a dry run stops
too early. A pair without a review reports nothing rather than guessing.
"""

from __future__ import annotations

import logging

from loopscope.capture.settings import RunSettings
from loopscope.capture.support_table import SUPPORT, SupportEntry
from loopscope.errors import UnsupportedError

_LOG = logging.getLogger("loopscope")


def gaps(task: str, backend: str) -> tuple[SupportEntry, ...]:
    """Every declared gap of a pair; empty where it was not reviewed."""
    return SUPPORT.get((task, backend), ())


def is_reviewed(task: str, backend: str) -> bool:
    """True where the pair was reviewed; without a review nothing is claimed about it."""
    return (task, backend) in SUPPORT


def check_config(settings: RunSettings, task: str, backend: str) -> list[SupportEntry]:
    """The gaps of the pair for fields that were really set."""
    return [entry for entry in gaps(task, backend) if settings.asks_for(entry.field)]


def preflight(settings: RunSettings, task: str, backend: str) -> list[SupportEntry]:
    """Log the gaps of this run, and stop it where one is rejected.

    Raises:
        UnsupportedError: names every rejected setting and why.
    """
    found = check_config(settings, task, backend)
    for entry in found:
        _LOG.warning(
            "%s on %s: %s=%r is %s: %s",
            task, backend, entry.field, getattr(settings, entry.field), entry.status, entry.reason,
        )  # fmt: skip
    rejected = [entry for entry in found if entry.status == "rejected"]
    if rejected:
        raise UnsupportedError(
            f"{task} on {backend} does not support "
            + "; ".join(
                f"{entry.field}={getattr(settings, entry.field)!r}: {entry.reason}" for entry in rejected
            )
            + ". `loopscope support` lists every such setting."
        )
    return found
