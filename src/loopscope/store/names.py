"""Names of the files of a run."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loopscope.errors import ConfigError

MANIFEST = "run.json"
TABLES_DIR = "tables"
JOURNAL_DIR = "journal"
ATTEMPTS_DIR = "attempts"
ATTEMPT_PART = "attempts.parquet"
"""The one file that is replaced: it is derived from attempts/ and says which rows are live."""

_WRITER = re.compile(r"[A-Za-z0-9_]{1,64}")
_JOURNAL = re.compile(r"(\d{1,9})-([A-Za-z0-9_]{1,64})-(\d{1,9})\.wal")
_LEDGER = re.compile(r"(\d{1,9})-([A-Za-z0-9_]{1,64})-(\d{1,9})\.sealed")
_PART = re.compile(r"part-(\d{1,9})-([A-Za-z0-9_]{1,64})-(\d{1,9})-([0-9a-f]{8})\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One journal file and the Parquet parts that are made of it."""

    attempt: int
    writer: str
    seq: int

    @property
    def stem(self) -> str:
        """``<attempt>-<writer>-<seq>``."""
        return f"{self.attempt:05d}-{self.writer}-{self.seq:05d}"

    @property
    def chain(self) -> tuple[int, str]:
        """Attempt and writer, whose segments are numbered from 1 without a gap."""
        return self.attempt, self.writer

    @property
    def journal(self) -> str:
        """The journal's file name."""
        return f"{self.stem}.wal"

    @property
    def ledger(self) -> str:
        """The file that says which parts were made of the journal, and how many rows they hold."""
        return f"{self.stem}.sealed"

    def part(self, crc: int) -> str:
        """The file name of a sealed part whose content has this CRC-32."""
        return f"part-{self.stem}-{crc:08x}.parquet"


def newest_of(segments: Iterable[Segment]) -> dict[tuple[int, str], int]:
    """Chain → its highest number."""
    return {segment.chain: segment.seq for segment in sorted(segments)}


def parse_journal(name: str) -> Segment | None:
    """The segment of a journal's file name; None for another file."""
    return Segment(int(match[1]), match[2], int(match[3])) if (match := _JOURNAL.fullmatch(name)) else None


def parse_ledger(name: str) -> Segment | None:
    """The segment of a ledger's file name; None for another file."""
    return Segment(int(match[1]), match[2], int(match[3])) if (match := _LEDGER.fullmatch(name)) else None


def parse_part(name: str) -> tuple[Segment, int] | None:
    """Segment and CRC-32 of a part's file name; None for another file."""
    match = _PART.fullmatch(name)
    return (Segment(int(match[1]), match[2], int(match[3])), int(match[4], 16)) if match else None


def check_writer(name: str) -> str:
    """The name, if it can be part of a file name.

    Raises:
        ConfigError: it cannot.
    """
    if not _WRITER.fullmatch(name):
        raise ConfigError(
            f"writer is {name!r}, expected 1 to 64 letters, digits or underscores, such as 'r0'"
        )
    return name


def attempt_file(number: int) -> str:
    """The file name of an attempt's record."""
    return f"{number:05d}.json"


def table_dir(root: Path, table: str) -> Path:
    """The folder of a table's parts."""
    return root / TABLES_DIR / table
