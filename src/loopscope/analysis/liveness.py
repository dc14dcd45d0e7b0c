"""The state of a run: a pure function of what is on its disk, of what its processes answer, and of a clock."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loopscope.errors import StoreError
from loopscope.store.attempts import find_attempt, newest_attempt
from loopscope.store.locks import GRACE_S
from loopscope.store.names import ATTEMPT_PART, JOURNAL_DIR, MANIFEST, TABLES_DIR
from loopscope.store.status import Record, read_records

Liveness = Literal["running", "silent", "finished", "terminated", "preempted", "crashed", "abandoned"]
"""What `liveness` answers:

* running: a process writes it: it lives, or where it cannot be asked it showed a sign of life within `GRACE_S`;
* silent: its process cannot be asked from here, and shows no sign of life;
* finished: closed by its own processes, with no error and no signal;
* terminated: a signal came (SIGTERM, SIGHUP, SIGINT), and the run ended;
* preempted: the scheduler said that it takes the machine away, as configured, and no rank recorded an error;
* crashed: a process recorded an error, or is gone from its own machine without a word;
* abandoned: silent for `ABANDONED_S`.
"""

ABANDONED_S = 7 * 86400.0

_Ending = Literal[
    "running", "error", "preempted", "died", "preempted?", "terminated", "silent", "abandoned", "finished"
]
_SPEAKS: dict[_Ending, Liveness] = {
    "running": "running",
    "error": "crashed",
    "preempted": "preempted",
    "died": "crashed",
    "preempted?": "preempted",
    "terminated": "terminated",
    "silent": "silent",
    "abandoned": "abandoned",
    "finished": "finished",
}
"""Which ending of one process speaks for all, the first one first, and what the run is called then. "preempted?" is a
SIGTERM where that is the scheduler's signal: a launcher sends it too, to healthy peers of a rank that died, so that a
process that is gone without a word outweighs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process of the newest attempt. Times are seconds of the file system's clock."""

    alive: bool | None
    """Whether it lives and writes this very folder; None where it cannot be asked from here."""
    closed: bool = False
    """It gave the run back by itself."""
    beat: float = 0.0
    """Its last sign of life."""
    signals: frozenset[str] = frozenset()
    """Signals that came."""
    preempting: frozenset[str] = frozenset()
    """Signals that the scheduler sends, as configured."""
    notice: bool = False
    """The scheduler's file or variable was there."""
    error: bool = False
    """It recorded an exception, before any signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the state of a run follows from."""

    processes: tuple[ProcessFacts, ...] = ()
    """Of the newest attempt, and the owner."""
    last_change: float | None = None
    """When the run's files changed last, where its newest attempt should have left a record and has none."""


def judge(facts: RunFacts, now: float) -> Liveness:
    """The state at `now`, by the clock of the file system that holds the run."""
    endings = {_ending(process, now) for process in facts.processes}
    if not endings and facts.last_change is not None:
        # A copy without its locks: nobody writes it here, and nothing says how it ended there.
        endings = {_unheard(facts.last_change, now)}
    return next((state for ending, state in _SPEAKS.items() if ending in endings), "finished")


def _ending(process: ProcessFacts, now: float) -> _Ending:
    if process.alive or (process.alive is None and abs(now - process.beat) < GRACE_S):
        # Either way: a clock that jumped back must not let a dead writer live until it has caught up.
        return "running"
    if process.error:
        return "error"
    scheduled = process.signals & process.preempting
    if process.notice or scheduled - {"SIGTERM"}:
        return "preempted"
    if scheduled:
        return "preempted?"
    if process.signals:
        return "terminated"
    if process.closed:
        return "finished"
    return "died" if process.alive is False else _unheard(process.beat, now)


def _unheard(beat: float, now: float) -> _Ending:
    return "abandoned" if now - beat >= ABANDONED_S else "silent"


def read_facts(root: Path) -> RunFacts:
    """The facts about a run directory; asks the processes of this machine that it names.

    Raises:
        OSError, StoreError: a folder or a file cannot be read.
    """
    attempt = newest_attempt(root)
    records = read_records(root, attempt)
    if records or not attempt or not _leaves_records(root, attempt):
        return RunFacts(processes=tuple(_process(group) for group in _by_process(records)))
    return RunFacts(last_change=_last_change(root))


def _by_process(records: Iterable[Record]) -> list[list[Record]]:
    groups: dict[object, list[Record]] = defaultdict(list)
    for record in records:
        # One that cannot be read is a process of its own.
        groups[record.path if record.holder is None else record.holder.process].append(record)
    return list(groups.values())


def _process(records: Sequence[Record]) -> ProcessFacts:
    # One writer may have left several files: its lock may once have been taken for a dead one's.
    latest = {r.name: r for r in sorted(records, key=lambda r: r.status.count)}.values()
    # How a process ended stands with its rows; the owner's lock says no more than that it owned the run.
    writers = [r for r in latest if r.attempt is not None] or latest
    answers = {r.alive() for r in latest if not r.status.ended}
    holders = [r.holder for r in records if r.holder is not None]
    return ProcessFacts(
        alive=True if True in answers else None if None in answers else False,
        closed=all(r.status.ended == "closed" for r in writers),
        beat=max(r.touched_ns for r in records) / 1e9,
        signals=frozenset(
            s for r in records for s in (*r.signals, *([r.status.signal] if r.status.signal else []))
        ),
        preempting=frozenset(signal for holder in holders for signal in holder.preempting),
        notice=any(r.status.preempted_by for r in records),
        error=any(r.status.error and not r.status.after_signal for r in records),
    )


def _leaves_records(root: Path, attempt: int) -> bool:
    try:
        return find_attempt(root, attempt).leaves_record
    except StoreError:
        return True  # Its own record is damaged: what became of it is not known either.


def _last_change(root: Path) -> float:
    paths = [
        root / MANIFEST,
        root / TABLES_DIR / "attempt" / ATTEMPT_PART,
        *(root / JOURNAL_DIR).glob("*.wal"),
    ]
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def liveness(path: str | os.PathLike[str], now: float | None = None) -> Liveness:
    """The state of the run in a folder; "silent" where its files cannot be read.

    Args:
        path: the run directory.
        now: seconds since 1970 of the file system's clock; this machine's clock where None.
    """
    try:
        facts = read_facts(Path(path))
    except (OSError, StoreError):
        return "silent"
    return judge(facts, time.time() if now is None else now)
