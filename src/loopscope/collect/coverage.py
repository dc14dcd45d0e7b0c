"""Expected visits against seen ones: a silenced hook or a frozen branch shows here, at every traced step."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loopscope.trace import VisitSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What one traced step saw of what it should have seen."""

    seen: int
    """Expected visits that were seen."""
    expected: int
    """Visits that the model's configuration promises for this step's R."""
    missing: tuple[VisitSpec, ...]
    """Expected and not seen (in at least one microbatch)."""
    unexpected: tuple[VisitSpec, ...]
    """Seen and not expected: another position, block, expert count or k than promised."""

    @property
    def ratio(self) -> float | None:
        """seen / expected; None where nothing was promised."""
        return self.seen / self.expected if self.expected else None

    def detail(self) -> str:
        """JSON text for the health row, with positions."""
        found: dict[str, object] = {"seen": self.seen, "expected": self.expected}
        if self.missing:
            found["missing"] = [visit.unrolled_pos for visit in self.missing]
        if self.unexpected:
            found["unexpected"] = [visit.unrolled_pos for visit in self.unexpected]
        return json.dumps(found)


def at_depth(visits: Iterable[VisitSpec], num_stacks: int) -> tuple[VisitSpec, ...]:
    """The promised visits of a step that ran `num_stacks` loop steps.

    The promise is made for the largest R. A step of smaller R lacks the later loop steps, and its tail lies
    earlier by the loop visits that did not happen.
    """
    visits = tuple(visits)
    absent = sum(1 for visit in visits if visit.block == "loop" and visit.loop_step >= num_stacks)
    kept = []
    for visit in visits:
        if visit.block == "tail":
            kept.append(replace(visit, unrolled_pos=visit.unrolled_pos - absent))
        elif visit.block == "head" or visit.loop_step < num_stacks:
            kept.append(visit)
    return tuple(kept)


def compare(expected: Iterable[VisitSpec], seen: Iterable[VisitSpec]) -> Coverage:
    """Compare whole visits: a visit at a promised position with another E or k counts as unexpected. Where nothing is
    promised, nothing is missing and nothing unexpected."""
    promised, found = set(expected), set(seen)
    if not promised:
        return Coverage(seen=len(found), expected=0, missing=(), unexpected=())
    return Coverage(
        seen=len(promised & found),
        expected=len(promised),
        missing=tuple(sorted(promised - found)),
        unexpected=tuple(sorted(found - promised)),
    )
