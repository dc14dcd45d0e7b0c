"""What was to be traced and was not: a step without a training forward, blocks that were not called."""

import logging
from collections import Counter

from loopscope.capture.adapter import Recording
from loopscope.capture.errors import CoverageError
from loopscope.collect import Collector
from loopscope.errors import TraceError

_log = logging.getLogger("loopscope.session")


class Unseen:
    """Counts forwards that belong to no step, and tells them where a step had none."""

    def __init__(self) -> None:
        self._ignored: Counter[str] = Counter()
        """Why forwards did not count → how many."""
        self._told: set[str] = set()

    def ignore(self, why: str) -> None:
        """A forward does not count."""
        self._ignored[why] += 1

    def tell(self, collector: Collector, step: int, *, raises: bool) -> None:
        """Say that nothing came, in the run and in the log.

        Raises:
            TraceError: with `raises`.
        """
        ignored = ", ".join(f"{count} {why}" for why, count in self._ignored.items())
        detail = (
            f"step {step} was to be traced and no training forward was seen in it"
            f"{f' (forwards that do not count so far: {ignored})' if ignored else ''}. Expected the model that "
            "was attached to be called itself (not .forward, not a part of it), in training mode with gradients"
        )
        collector.record_event(step, "no_trace", "critical", detail=detail)
        _log.warning("%s", detail)
        if raises:
            raise TraceError(detail)

    def tell_remarks(self, collector: Collector, step: int, recording: Recording, *, raises: bool) -> None:
        """Say once what a forward did not do as promised; its other visits have their rows.

        Raises:
            CoverageError: with `raises`.
        """
        for remark in recording.remarks():
            if raises and remark.severity != "info":
                raise CoverageError(remark.detail)
            if remark.detail not in self._told:
                self._told.add(remark.detail)
                collector.record_event(step, remark.event, remark.severity, detail=remark.detail)
                if remark.severity != "info":
                    _log.warning("step %d: %s", step, remark.detail)
