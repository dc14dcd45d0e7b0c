"""The machine's own figures beside a run: which process of a host samples, into which writer, and until when."""

from __future__ import annotations

import os
from collections.abc import Callable

from loopscope.store import RunStore
from loopscope.store.write.journal_writer import JournalWriter
from loopscope.system import SystemSampler


def start_system(
    store: RunStore,
    writer: JournalWriter | None,
    *,
    attempt: int,
    rank: int,
    every_s: float,
    step: Callable[[], int],
) -> SystemSampler | None:
    """Sample this machine from here on; None where another process does, or nobody shall.

    Args:
        store: of the run.
        writer: of this process's rows; None where it writes none, and gets one for its machine alone.
        attempt: of the run.
        rank: of this process.
        every_s: seconds between two samples; 0 for none.
        step: the last step that has ended.
    """
    if every_s <= 0 or not samples(rank):
        return None
    own: list[JournalWriter] = [] if writer is None else [writer]

    def write(rows: list[dict[str, object]]) -> None:
        if not own:
            own.append(store.writer(attempt=attempt, writer=f"m{rank:05d}", on_error="record"))
        own[0].append_many("system", rows)

    sampler = SystemSampler(write, every_s=every_s, step=step, folder=str(store.path))
    return sampler if sampler.start() else None


def samples(rank: int) -> bool:
    """True for one process of each host: local rank 0 where the launcher says which that is, else rank 0."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) == 0 if local.isdigit() else rank == 0
