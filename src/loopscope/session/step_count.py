"""Which optimizer step, and which microbatch of it, a training forward belongs to."""

import operator
from collections.abc import Callable
from typing import Any

from loopscope.errors import ConfigError


class StepCount:
    """Counts training forwards into optimizer steps. Knows nothing of models: others tell it what happened.

    A step begins with its first forward, or where `begin` says so, and ends once: with its last forward where their
    number is known, with `end`, with an optimizer's update, or where the next step begins.

    Args:
        first_step: number of the first step.
        num_microbatches: forwards of a step; None: as many as come before it is ended.
        started: called when a step begins: its number.
        ended: called when a step ends: its number, and whether it had a forward.
    """

    def __init__(
        self,
        first_step: int,
        num_microbatches: int | None,
        *,
        started: Callable[[int], None],
        ended: Callable[[int, bool], None],
    ) -> None:
        self.step = first_step - 1
        """The current step, or the last one where none is open; `first_step` - 1 before the first."""
        self.num_microbatches = num_microbatches
        """Forwards of the current step, where that is known."""
        self.microbatch = -1
        """0-based number of the last forward within its step; -1 before the first."""
        self._first_step = first_step
        self._ended_step = first_step - 1
        self._by_hand = False
        self._started, self._ended = started, ended

    @property
    def has_begun(self) -> bool:
        """True from the first step on."""
        return self.step >= self._first_step

    @property
    def is_open(self) -> bool:
        """True while a step has begun and not ended."""
        return self.step > self._ended_step

    @property
    def is_full(self) -> bool:
        """True where the current step has had all the forwards it was to have."""
        return self.num_microbatches is not None and self.microbatch + 1 >= self.num_microbatches

    def begin(self, step: int, num_microbatches: int | None) -> None:
        """A step begins, by hand; the one before it ends.

        Raises:
            ConfigError: it is no step behind the last one, or its forwards are no number.
        """
        number, forwards = _whole(step, "step"), num_microbatches
        if forwards is not None:
            forwards = _whole(forwards, "num_microbatches")
        # Begun again with nothing in it, it is the same step: a batch was skipped, or its forward failed.
        if not (self.is_open and number == self.step and self.microbatch < 0):
            self.end()
            if number < self._first_step:
                raise ConfigError(
                    f"step is {number}, expected {self._first_step} (`first_step` of attach) or more."
                )
            if self._by_hand and self.has_begun and number <= self.step:
                raise ConfigError(
                    f"step is {number}, expected more than {self.step}: each begins once, in order."
                )
        self._by_hand, self.num_microbatches = True, forwards
        self._start(number)

    def by_hand(self) -> None:
        """Steps are told, and none is open: forwards belong to none until the next begins."""
        self.end()
        self._by_hand = True

    def forward(self) -> bool:
        """A training forward begins; False where it belongs to no step (outside those that are told by hand)."""
        # At every step of a training: no property is asked that was asked a line before.
        is_open, is_full = self.step > self._ended_step, self.is_full
        if not self._by_hand and (is_full or not is_open):
            if is_open:
                self.end()
            self._start(self.step + 1)
        elif is_full or not is_open:
            return False
        self.microbatch += 1
        return True

    def failed(self) -> None:
        """The last forward raised. It was no microbatch: the loop ends, or tries again."""
        self.microbatch = max(self.microbatch - 1, -1)

    def done(self) -> None:
        """The last forward ended well, and is dealt with."""
        if self.is_full:
            self.end()

    def updated(self, leads: bool = True) -> None:
        """An optimizer has stepped.

        Args:
            leads: True for the one whose updates are steps even where no forward was seen in between; False for those
                that share its update.
        """
        if leads and not self._by_hand and not self.is_open:
            self._start(self.step + 1)
        self.end()

    def end(self) -> None:
        """No further forward of the current step comes. Said twice, it means nothing."""
        if self.is_open:
            self._ended_step = self.step
            self._ended(self.step, self.microbatch >= 0)

    def drop(self) -> None:
        """The current step did not come to its end: nobody hears of it."""
        self._ended_step = max(self._ended_step, self.step)

    def _start(self, step: int) -> None:
        self.step, self.microbatch = step, -1
        self._ended_step = min(self._ended_step, step - 1)
        self._started(step)


def _whole(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or value is True:
        raise ConfigError(f"{name} is {value!r}, expected an integer >= 1.")
    return number
