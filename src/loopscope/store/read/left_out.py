"""Rows that a reader had to leave out: named in the answer that lacks them, and never an empty one."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from loopscope.errors import LeftOutWarning, UnreadableError
from loopscope.store.names import ATTEMPTS_DIR, JOURNAL_DIR, TABLES_DIR
from loopscope.store.read.files import Problem, RunFiles

_NAMED = 3
_OF_ALL = (f"{JOURNAL_DIR}/", f"{ATTEMPTS_DIR}/")


def of_table(problems: Sequence[Problem], table: str) -> list[Problem]:
    """Those problems that cost a table rows, or may have."""
    return [
        problem
        for problem in problems
        if problem.lost_rows != 0
        and problem.kind != "manifest"
        and (problem.table or table) == table
        and (
            problem.where == TABLES_DIR
            or f"{problem.where}/".startswith((f"{TABLES_DIR}/{table}/", *_OF_ALL))
        )
    ]


def missing_parts(files: RunFiles) -> list[Problem]:
    """Parts that a ledger names and that are not there."""
    there = {(part.table, part.segment) for parts in files.parts.values() for part in parts}
    found = []
    for segment, ledger in sorted(files.ledgers.items()):
        if segment in files.journals:
            continue
        for table, count in ledger.rows.items():
            if (table, segment) not in there:
                where = f"{TABLES_DIR}/{table}/part-{segment.stem}-{ledger.crc32.get(table, '')}.parquet"
                found.append(Problem("part", where, "is not there any more", count))
    return found


def tell(
    root: Path, table: str, problems: Sequence[Problem], *, has_rows: bool, was_there: bool, stacklevel: int
) -> None:
    """Say what an answer lacks.

    Args:
        root: the run.
        table: that was asked for.
        problems: what was left out of it.
        has_rows: whether there is anything else in the answer.
        was_there: whether files of the table were seen when the run was opened.
        stacklevel: of the caller that is named.

    Warns:
        LeftOutWarning: rows are missing; or this user may not even see how many there are.

    Raises:
        UnreadableError: files were there, and nothing of them can be read any more.
    """
    if not problems:
        return
    named = "; ".join(str(problem) for problem in problems[:_NAMED])
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    text = f"{root}: rows of table {table!r} are left out: {named}{more}"
    if was_there and not has_rows:
        raise UnreadableError(
            f"{text}. Nothing of it could be read; expected the run's files where they were when it was opened. "
            "open_run(path, partial=True) reads what there is, and `loopscope verify` says what is wrong."
        )
    warnings.warn(f"{text}. `loopscope verify` says what is wrong", LeftOutWarning, stacklevel=stacklevel + 1)
