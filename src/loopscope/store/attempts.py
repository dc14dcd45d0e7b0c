"""Attempts of a run, and which of them are live at which steps."""

import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loopscope import __version__
from loopscope.errors import ConfigError, StoreError
from loopscope.store.checksum import decode_document, encode_document
from loopscope.store.disk import Disk, create_file
from loopscope.store.ids import this_process
from loopscope.store.manifest import Attempt, Manifest
from loopscope.store.names import ATTEMPTS_DIR, attempt_file


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
        # An attempt may start at an earlier step than its child: the earlier of the two starts ends the range before.
        end = attempt.first_step if end is None else min(end, attempt.first_step)
        current = attempt.parent_attempt
    return ranges


def chain_faults(attempts: Sequence[Attempt]) -> list[str]:
    """What is wrong with the parents that attempts name."""
    known = {a.attempt for a in attempts}
    named = [(a.attempt, a.parent_attempt) for a in attempts if a.parent_attempt is not None]
    return [
        f"attempt {number} names parent attempt {parent}, which is not {'older' if parent in known else 'there'}"
        for number, parent in named
        if parent not in known or parent >= number
    ]


def new_attempt(
    root: Path,
    manifest: Manifest,
    first_step: int,
    parent_attempt: int | None,
    world_size: int,
    torch_version: str | None,
) -> Attempt:
    """The record of an attempt that this process claims; its number is found by `create_attempt`.

    Raises:
        ConfigError: a number is out of range, or the parent is not there.
    """
    if first_step < 0 or world_size < 1:
        raise ConfigError(
            f"first_step is {first_step} and world_size {world_size}, expected first_step >= 0, world_size >= 1"
        )
    known = [a.attempt for a in merge_attempts(read_attempts(root)[0], manifest.attempts)]
    if parent_attempt not in (None, *known):
        raise ConfigError(
            f"parent_attempt is {parent_attempt}, expected one of {known}, the attempts of run {manifest.run_id}. The "
            "checkpoint belongs to another run, or names an attempt that was removed."
        )
    return Attempt(
        attempt=0,
        parent_attempt=parent_attempt,
        first_step=first_step,
        world_size=world_size,
        process=this_process(),
        started=datetime.now(UTC),
        loopscope_version=__version__,
        torch_version=torch_version or manifest.versions.get("torch"),
        python_version=platform.python_version(),
        leaves_record=True,
    )


def create_attempt(disk: Disk, root: Path, wanted: Attempt) -> Attempt:
    """Claim the next number; of several processes that ask, each gets another one."""
    folder = root / ATTEMPTS_DIR
    number = newest_attempt(root)
    while True:
        number += 1
        attempt = msgspec.structs.replace(wanted, attempt=number)
        try:
            create_file(disk, folder / attempt_file(number), encode_document(attempt))
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
        else:
            if attempt.attempt == number:
                found.append(attempt)
            else:
                faults.append(f"{ATTEMPTS_DIR}/{name} says that it is attempt {attempt.attempt}")
    return found, faults


def newest_attempt(root: Path) -> int:
    """The highest number that was claimed; 0 before the first. StoreError where the folder cannot be listed."""
    return max([0, *_numbers(root / ATTEMPTS_DIR)])


def find_attempt(root: Path, number: int, where: Path | None = None) -> Attempt:
    """The record of a claimed attempt; `where` is the run's path for people.

    Raises:
        StoreError: it is not there.
    """
    for record in read_attempts(root)[0]:
        if record.attempt == number:
            return record
    raise StoreError(
        f"attempt {number} of run {where or root} is not there; expected a number that claim_attempt() "
        "returned on rank 0. Broadcast it to the other ranks after it was claimed."
    )


def merge_attempts(*sources: Sequence[Attempt]) -> list[Attempt]:
    """One list; where several sources know an attempt, the first counts."""
    merged = {attempt.attempt: attempt for source in reversed(sources) for attempt in reversed(source)}
    return [merged[n] for n in sorted(merged)]


def attempt_rows(
    run_id: str, attempts: Sequence[Attempt], ranges: Mapping[int, LiveRange]
) -> list[dict[str, object]]:
    """The rows of the table `attempt`."""
    return [
        {
            "run_id": run_id,
            "attempt": a.attempt,
            "parent_attempt": a.parent_attempt,
            "first_step": a.first_step,
            "live_from": live.start if (live := ranges.get(a.attempt)) else None,
            "live_to": live.end if live else None,
            "world_size": a.world_size,
            "host": a.process.host if a.process else None,
            "pid": a.process.pid if a.process else None,
            "started": a.started,
            "loopscope_version": a.loopscope_version,
            "torch_version": a.torch_version,
            "python_version": a.python_version,
        }
        for a in attempts
    ]


def _numbers(folder: Path) -> dict[int, str]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - one call, one failure
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed: {error.strerror or error}") from None
    return {int(n[:-5]): n for n in names if n.endswith(".json") and n[:-5].isdigit()}
