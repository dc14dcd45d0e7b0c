"""`dead_expert`: an expert that stays empty although it was due enough tokens."""

from collections.abc import Sequence

import numpy as np

from loopscope.catalog.row_batch import RowBatch, relevant
from loopscope.catalog.rows import VISIT
from loopscope.catalog.rule import Judgement, Readings, Rule, RuleBounds, RuleCheck

_NUMBERS = ("dead_experts", "num_experts", "top_k", "num_tokens")
_COUNTS = "expert_count"


class _EmptyStreaks:
    """Per expert of one visit: how many traces in a row it got nothing, and what it should have got in them."""

    def __init__(self) -> None:
        self.since: list[int] = []
        self._traces: list[int] = []
        self._due: list[float] = []

    def see(self, counts: Sequence[int], due: float, step: int, bounds: RuleBounds) -> list[int]:
        """The experts that are dead by now. `due`: T·k/E of this trace."""
        if len(counts) != len(self.since):
            self.since, self._traces, self._due = (
                [step] * len(counts),
                [0] * len(counts),
                [0.0] * len(counts),
            )
        dead = []
        for expert, count in enumerate(counts):
            if count:
                self._traces[expert], self._due[expert] = 0, 0.0
                continue
            if not self._traces[expert]:
                self.since[expert] = step
            self._traces[expert] += 1
            self._due[expert] += due
            if self._traces[expert] >= bounds.sustain and self._due[expert] >= bounds.dead_expected:
                dead.append(expert)
        return dead


def _judge(batch: RowBatch, bounds: RuleBounds, memory: dict[str, _EmptyStreaks]) -> Readings:
    empty, experts, k, tokens = (batch.floats(name) for name in _NUMBERS)
    known = ~np.isnan(empty) & (experts > 0) & (k > 0) & (tokens > 0)
    excess, since = np.where(known, 0.0, np.nan), batch.step
    dead: dict[int, list[int]] = {}
    some = known & (empty > 0)
    if memory or some.any():
        visits, counts = batch.visits, batch.column(_COUNTS)
        excess, since = excess.copy(), since.copy()
        for i in relevant(visits, some, known & ~some, memory).tolist():
            name = visits.names[visits.code[i]]
            if not some[i] or counts[i] is None:
                memory.pop(name, None)
                continue
            streaks = memory.setdefault(name, _EmptyStreaks())
            dead[i] = found = streaks.see(
                counts[i], float(tokens[i] * k[i] / experts[i]), int(batch.step[i]), bounds
            )
            if found:
                excess[i], since[i] = 1.0 + len(found), min(streaks.since[expert] for expert in found)

    def text(i: int) -> str:
        named = ", ".join(str(e) for e in dead[i][:8]) + (", ..." if len(dead[i]) > 8 else "")
        which = f"expert {named}" if len(dead[i]) == 1 else f"{len(dead[i])} experts ({named})"
        return f"{which} of {int(experts[i])} got no token over {bounds.sustain} traces or more"

    return Readings(
        np.arange(len(empty)),
        np.maximum(excess - 1, 0.0),
        excess,
        lambda: batch.visits,
        text,
        since=since,
    )


RULE = Rule(
    name="dead_expert",
    title="Experts get no tokens",
    bound="the same expert at 0 over {sustain} traces, where it should have had >= {dead_expected:g} assignments",
    why="a balanced router leaves an expert empty this long with chance e^-{dead_expected:g}",
    chart="dead",
    window="own",
    judgements=(Judgement(table="router", columns=(*VISIT, *_NUMBERS, _COUNTS), judge=_judge),),
    check=RuleCheck(title="Every expert is used", bound="none in any visit", missing="no router has a value"),
)
