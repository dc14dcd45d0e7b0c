"""`loopscope compact RUN`: the live rows as a few large Parquet files, or Delta tables."""

from dataclasses import dataclass
from pathlib import Path

from loopscope.cli.console import make_console, make_table, plain, titled, working
from loopscope.cli.flags import RunFlag
from loopscope.store.read.compact import adopt_into_delta, compact_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Compact(RunFlag):
    """Write the live rows of a run as a dataset of few, large Parquet files, one folder per table.

    The run itself is left as it is. Exit status 0: every row is there; 1: some could not be read, and are named.
    """

    out: Path | None = None
    """Where to write; RUN/compact where not given."""
    delta: bool = False
    """Make each table a Delta table as well (needs deltalake; no JVM)."""

    def run(self) -> int:
        """Compact and report."""
        with working("compacting"):
            compacted = compact_run(self.path, self.out)
            versions = adopt_into_delta(compacted) if self.delta else {}
        console = make_console()
        rows = [
            (name, compacted.rows[name], len(files), f"version {versions[name]}" if name in versions else "")
            for name, files in compacted.files.items()
        ]
        table = make_table(("table", "live rows", "files", "delta"), rows, left=("table",))
        console.print(*titled(str(compacted.path), table), sep="\n")
        for problem in compacted.problems:
            console.print(plain(f"wrong ({problem.kind}): {problem}"), markup=False)
        return 1 if any(p.lost_rows != 0 for p in compacted.problems) else 0
