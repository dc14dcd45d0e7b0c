"""Attempts of a run, and which of them are live at which steps."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loopscope.errors import StoreError
from loopscope.store.checksum import decode_document, encode_document
from loopscope.store.disk import Disk, create_file
from loopscope.store.manifest import Attempt
from loopscope.store.names import ATTEMPTS_DIR


@dataclass(frozen=True, slots=True)
class LiveRange:
    """The steps at which an attempt's rows are live: start <= step < end."""

    start: int
    end: int | None
    """None for the newest attempt, which nothing replaces."""

    def holds(self, step: int) -> bool:
        """True where a row of this step is live."""
        return self.start <= step and (self.end is None or step < self.end)


def live_ranges(attempts: Sequence[Attempt], with_rows: Collection[int]) -> dict[int, LiveRange]:
    """Attempt number → live steps; an attempt that is not in it has no live row.

    Walks from the newest attempt that wrote a row to its ancestors. An ancestor is live from its own first step
    (from step 0 where it started fresh, since the probe before the first step belongs to it) up to the first
    step of its child.
    """
    by_number = {a.attempt: a for a in attempts}
    current = max((n for n in by_number if n in with_rows), default=None)
    ranges: dict[int, LiveRange] = {}
    end: int | None = None
    while current is not None and current in by_number and current not in ranges:
        attempt = by_number[current]
        fresh = attempt.parent_attempt is None or attempt.parent_attempt not in by_number
        start = 0 if fresh else attempt.first_step
        ranges[current] = LiveRange(start, end)
        # A chain may go back behind its own child: the earlier of the two starts ends what lies before.
        end = attempt.first_step if end is None else min(end, attempt.first_step)
        current = attempt.parent_attempt
    return ranges


def chain_faults(attempts: Sequence[Attempt]) -> list[str]:
    """What is wrong with the parents that attempts name."""
    known = {a.attempt for a in attempts}
    faults = []
    for a in attempts:
        if a.parent_attempt is None:
            continue
        if a.parent_attempt not in known:
            faults.append(f"attempt {a.attempt} names parent attempt {a.parent_attempt}, which is not there")
        elif a.parent_attempt >= a.attempt:
            faults.append(f"attempt {a.attempt} names parent attempt {a.parent_attempt}, which is not older")
    return faults


def create_attempt(disk: Disk, root: Path, wanted: Attempt) -> Attempt:
    """Claim the next number; of several processes that ask, each gets another one."""
    folder = root / ATTEMPTS_DIR
    number = max([0, *_numbers(folder)])
    while True:
        number += 1
        attempt = msgspec.structs.replace(wanted, attempt=number)
        try:
            create_file(disk, folder / f"{number:05d}.json", encode_document(attempt))
        except FileExistsError:
            continue
        return attempt


def read_attempts(root: Path) -> tuple[list[Attempt], list[str]]:
    """The attempts of a run by number, and what could not be read (an attempt that died while claiming)."""
    folder = root / ATTEMPTS_DIR
    found: list[Attempt] = []
    faults: list[str] = []
    for number, name in sorted(_numbers(folder).items()):
        try:
            attempt = decode_document((folder / name).read_bytes(), Attempt)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            faults.append(f"attempt {number}: {ATTEMPTS_DIR}/{name} cannot be read ({error})")
            continue
        if attempt.attempt != number:
            faults.append(f"{ATTEMPTS_DIR}/{name} says that it is attempt {attempt.attempt}")
            continue
        found.append(attempt)
    return found, faults


def merge_attempts(*sources: Sequence[Attempt]) -> list[Attempt]:
    """One list; where several sources know an attempt, the first counts."""
    merged: dict[int, Attempt] = {}
    for source in sources:
        for attempt in source:
            merged.setdefault(attempt.attempt, attempt)
    return [merged[n] for n in sorted(merged)]


def attempt_rows(
    run_id: str, attempts: Sequence[Attempt], ranges: Mapping[int, LiveRange]
) -> list[dict[str, object]]:
    """The rows of the table `attempt`."""
    rows: list[dict[str, object]] = []
    for a in attempts:
        live = ranges.get(a.attempt)
        row = {
            "run_id": run_id,
            "attempt": a.attempt,
            "parent_attempt": a.parent_attempt,
            "first_step": a.first_step,
            "live_from": live.start if live else None,
            "live_to": live.end if live else None,
            "world_size": a.world_size,
            "host": a.process.host if a.process else None,
            "pid": a.process.pid if a.process else None,
            "started": a.started,
            "loopscope_version": a.loopscope_version,
            "torch_version": a.torch_version,
            "python_version": a.python_version,
        }
        rows.append(row)
    return rows


def _numbers(folder: Path) -> dict[int, str]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - one call, one failure
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed: {error.strerror or error}") from None
    return {int(n[:-5]): n for n in names if n.endswith(".json") and n[:-5].isdigit()}
