"""The state of a run: over every order of what can happen to its processes, seen from its own machine, from another one
and in a copy, now, a little later and long after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loopscope.analysis.liveness import (
    ABANDONED_S,
    ProcessFacts,
    RunFacts,
    _by_process,
    _process,
    judge,
    liveness,
)
from loopscope.store.locks import GRACE_S
from loopscope.store.status import Holder, Record, Status

EVENTS = ("kill", "pause", "signal", "error", "finish", "resume", "take_over", "rename", "seal")
LONGEST = 4
"""Events behind the start: 9^4 orders of length 5, and all shorter ones."""


@dataclass(eq=False)
class Trainer:
    """A process, as it really is, and what it has left on the disk."""

    host: str
    living: bool = True
    paused: bool = False
    closed: bool = False
    signalled: bool = False
    failed: bool = False
    beat: float = 0.0
    seen_dead: bool = False


@dataclass
class World:
    now: float = 1e9
    trainers: list[Trainer] = field(default_factory=lambda: [Trainer("here")])

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for trainer in self.trainers:
            if trainer.living and not trainer.paused:
                trainer.beat = self.now

    def happen(self, event: str) -> None:
        self.wait(1.0)
        last = self.trainers[-1]
        if event == "kill":
            last.living = False
        elif event == "pause" and last.living:
            last.paused = True
            self.wait(2 * GRACE_S)
        elif event == "signal" and last.living:
            last.signalled, last.living = True, False
        elif event == "error" and last.living and not last.paused:
            last.failed, last.closed, last.living = True, True, False
        elif event == "finish" and last.living and not last.paused:
            last.closed, last.living = True, False
        elif event == "resume" and not last.living:  # refused where one lives
            last.seen_dead = not last.closed
            self.trainers.append(Trainer("here", beat=self.now))
        elif event == "take_over" and self.now - last.beat >= GRACE_S:
            self.trainers.append(Trainer("there", beat=self.now))

    def truth(self, view: str) -> str:
        """What is to be said of the newest attempt, from what really happened and what can be known from there."""
        last = self.trainers[-1]
        if view == last.host:
            if last.living:
                return "running"
            return (
                "crashed" if last.failed
                else "terminated" if last.signalled
                else "finished" if last.closed
                else "crashed"
            )  # fmt: skip
        if last.closed:
            return "crashed" if last.failed else "finished"
        quiet = self.now - last.beat
        if quiet < GRACE_S:
            return "running"
        return "terminated" if last.signalled else "silent" if quiet < ABANDONED_S else "abandoned"

    def state(self, view: str) -> str:
        records = [
            _record(trainer, number, view)
            for number, trainer in enumerate(self.trainers, 1)
            if number == len(self.trainers)
        ]
        facts = RunFacts(processes=tuple(_process(group) for group in _by_process(records)))
        return judge(facts, self.now)


@dataclass(frozen=True)
class Named:
    """A process's name in a lock file, asked from somewhere."""

    answer: bool | None
    number: int

    def alive(self) -> bool | None:
        return self.answer


def _record(trainer: Trainer, number: int, view: str) -> Record:
    asked: Any = Named(trainer.living if view == trainer.host else None, number)
    ended: Any = "closed" if trainer.closed else "died" if trainer.seen_dead else ""
    return Record(
        path=Path(f"{number:05d}-r0.1.lock"),
        name=f"{number:05d}-r0",
        attempt=number,
        writer="r0",
        held=not ended,
        holder=Holder(process=asked, started=datetime.now(UTC), run_id="run", signals=["SIGTERM"]),
        status=Status(count=1, ended=ended, error="KeyError: 'x'" if trainer.failed else ""),
        signals=("SIGTERM",) if trainer.signalled else (),
        touched_ns=int(trainer.beat * 1e9),
        own_file=view != "copy",
    )


def orders() -> Iterator[tuple[str, ...]]:
    for length in range(LONGEST + 1):
        yield from product(EVENTS, repeat=length)


def test_every_order_of_what_can_happen_seen_from_everywhere() -> None:
    looked = 0
    for order in orders():
        world = World(trainers=[Trainer("here", beat=1e9)])
        for event in order:
            world.happen(event)
        for pause in (0.0, 2 * GRACE_S, ABANDONED_S + 60):
            world.wait(pause)
            for view in ("here", "there", "copy"):
                looked += 1
                assert world.state(view) == world.truth(view), (order, pause, view)
    assert looked == 9 * sum(9**length for length in range(LONGEST + 1))


NOW = 1e9


@pytest.mark.parametrize("moved", [-3600.0, 0.0, 3600.0])
def test_a_clock_that_jumps_lets_no_dead_writer_live_for_longer_than_the_grace(moved: float) -> None:
    silent = RunFacts(processes=(ProcessFacts(alive=None, beat=NOW),))
    assert judge(silent, NOW + moved) == ("running" if moved == 0.0 else "silent")
    assert judge(RunFacts(processes=(ProcessFacts(alive=True, beat=NOW),)), NOW + moved) == "running"


def ended(**more: Any) -> ProcessFacts:
    return ProcessFacts(**{"alive": False, "beat": NOW - 60, **more})


TERM, USR1 = frozenset({"SIGTERM"}), frozenset({"SIGUSR1"})


@pytest.mark.parametrize(
    ("ranks", "state"),
    [
        ((ended(closed=True), ended(closed=True)), "finished"),
        ((ended(closed=True), ended()), "crashed"),
        # torchrun sends SIGTERM to the healthy peers of a rank that died without a word
        ((ended(), ended(signals=TERM)), "crashed"),
        ((ended(), ended(signals=TERM, preempting=TERM)), "crashed"),
        ((ended(error=True), ended(signals=TERM, preempting=TERM)), "crashed"),
        ((ended(signals=TERM), ended(signals=TERM)), "terminated"),
        ((ended(signals=TERM, preempting=TERM), ended(signals=TERM, preempting=TERM)), "preempted"),
        # what only the scheduler sends says so, whatever its grace period then does to a rank
        ((ended(), ended(signals=USR1, preempting=USR1)), "preempted"),
        ((ended(), ended(notice=True)), "preempted"),
        ((ended(error=True), ended(notice=True)), "crashed"),
        ((ended(signals=USR1), ended(closed=True)), "terminated"),
        ((ProcessFacts(alive=True), ended(error=True)), "running"),
        ((ended(closed=True), ProcessFacts(alive=None, beat=NOW - 60)), "silent"),
        ((ended(), ProcessFacts(alive=None, beat=NOW - 60)), "crashed"),
        ((ProcessFacts(alive=None, beat=NOW - ABANDONED_S),), "abandoned"),
        ((), "finished"),
    ],
)
def test_which_rank_speaks_for_all(ranks: tuple[ProcessFacts, ...], state: str) -> None:
    assert judge(RunFacts(processes=ranks), NOW) == state
    assert judge(RunFacts(processes=ranks[::-1]), NOW) == state


def test_a_copy_without_its_locks_says_nothing_of_how_it_ended() -> None:
    facts = RunFacts(last_change=NOW)
    assert judge(facts, NOW + 60) == "silent"
    assert judge(facts, NOW + ABANDONED_S) == "abandoned"


def test_a_folder_that_cannot_be_read_is_silent(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("no folder")
    assert liveness(tmp_path) == "silent"
