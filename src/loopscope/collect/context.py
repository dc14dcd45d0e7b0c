"""Who writes: the columns that every row of a collector shares, and the clock of its steps."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from loopscope.errors import ConfigError

Scope = Literal["rank_local", "global"]
RowDict = dict[str, object]

_REMEMBERED_STEPS = 256  # loss rows may come this many steps late and still carry their own step's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class RowContext:
    """The run, attempt and rank that a collector writes for."""

    run_id: str
    """UUIDv7 of the run."""
    attempt: int = 1
    """Number of this attempt, 1-based, claimed by rank 0."""
    rank: int = 0
    """This process's rank; rows of scope "global" carry null instead."""
    world_size: int = 1
    """Number of ranks of this attempt."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"RowContext has rank={self.rank}, world_size={self.world_size}, expected "
                "0 <= rank < world_size. Pass torch.distributed's rank and world size, "
                "or leave both out for a single process."
            )

    def keys(self, scope: Scope) -> RowDict:
        """The run-level key columns of a row of `scope`."""
        return {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "rank": None if scope == "global" else self.rank,
            "world_size": self.world_size,
            "aggregation_scope": scope,
        }


class StepClock:
    """When each of the last steps began, so that a row that comes late still tells its own step's time."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._steps: dict[int, tuple[float, float, int | None]] = {}
        """Step → monotonic seconds, seconds since 1970, tokens; made at every step, so plain numbers."""

    def begin(self, step: int, tokens_seen: int | None) -> None:
        """Note the start of `step`, or only its tokens where it has begun.

        Args:
            step: 1-based.
            tokens_seen: tokens of all ranks up to and with this step; None where they are not known, or not yet.
        """
        steps = self._steps
        known = steps.pop(step, None)
        if known is None:
            steps[step] = (time.monotonic(), time.time(), tokens_seen)
            if len(steps) > _REMEMBERED_STEPS:
                del steps[next(iter(steps))]
        else:
            steps[step] = known if tokens_seen is None else (known[0], known[1], tokens_seen)

    def last(self) -> int:
        """The last step that has ended: the one before that which began last; 0 before the first."""
        return max(max(self._steps, default=1) - 1, 0)

    def columns(self, step: int) -> RowDict:
        """`tokens_seen`, `elapsed_s` (since the attempt began) and `wall_time` (UTC) of `step`."""
        began, since_1970, tokens_seen = self._steps.get(step) or (time.monotonic(), time.time(), None)
        return {
            "tokens_seen": tokens_seen,
            "elapsed_s": began - self._start,
            "wall_time": datetime.fromtimestamp(since_1970, UTC),
        }
