"""What a rule remembers of earlier traces."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class DeadWindow:
    """Per expert of one visit: how many traces in a row it got nothing, and what it should have got in them."""

    window: int
    expected: float
    """Assignments over the window that make an empty expert no accident."""
    _streak: list[int] = field(default_factory=list)
    _due: list[float] = field(default_factory=list)
    _since: list[int] = field(default_factory=list)

    def see(self, counts: Sequence[int] | None, *, due: float, step: int) -> list[int]:
        """The experts that are dead by now. `counts` None: all had tokens. `due`: T·k/E of this trace."""
        if counts is None:
            self._streak, self._due, self._since = [], [], []
            return []
        if len(counts) != len(self._streak):
            self._streak, self._due, self._since = (
                [0] * len(counts),
                [0.0] * len(counts),
                [step] * len(counts),
            )
        dead = []
        for expert, count in enumerate(counts):
            if count:
                self._streak[expert], self._due[expert] = 0, 0.0
                continue
            if not self._streak[expert]:
                self._since[expert] = step
            self._streak[expert] += 1
            self._due[expert] += due
            if self._streak[expert] >= self.window and self._due[expert] >= self.expected:
                dead.append(expert)
        return dead

    def since(self, experts: Sequence[int]) -> int:
        """The first trace at which the longest empty of `experts` got nothing."""
        return min(self._since[expert] for expert in experts)


@dataclass(slots=True)
class BestMean:
    """The smallest mean of `window` values in a row so far."""

    window: int
    best: float | None = None
    _last: deque[float] = field(default_factory=deque)

    def see(self, value: float) -> None:
        """Take the next value in."""
        self._last.append(value)
        if len(self._last) > self.window:
            self._last.popleft()
        if len(self._last) == self.window:
            # Summed anew: a running sum never recovers from one huge value that went through it.
            mean = math.fsum(self._last) / self.window
            self.best = mean if self.best is None else min(self.best, mean)
