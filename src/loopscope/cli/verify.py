"""`loopscope verify RUN`: is everything that the run wrote still there, and right?"""

from dataclasses import dataclass

from loopscope.cli.console import make_console, make_table, plain, titled, working
from loopscope.cli.flags import RunFlag
from loopscope.store.read.verify import verify_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify(RunFlag):
    """Check every checksum, name, schema, sequence number and key of a run, and the live-row rule.

    Exit status 0: all is well; 1: something is wrong, and printed; 2: the folder is not a run.
    """

    def run(self) -> int:
        """Print what was checked and what is wrong."""
        with working("checking"):
            found = verify_run(self.path)
        console = make_console()
        rows = [(name, count, found.live[name]) for name, count in found.rows.items()]
        table = make_table(("table", "rows", "live"), rows, left=("table",))
        console.print(*titled(str(self.path), table), sep="\n")
        for word, problems in (("wrong", found.problems), ("note", found.notes)):
            for problem in problems:
                console.print(plain(f"{word} ({problem.kind}): {problem}"), markup=False)
        console.print(
            f"{found.parts} part(s) and {found.journals} journal(s) checked, {len(found.problems)} problem(s), "
            f"{found.lost_rows} row(s) known to be lost"
        )
        return 1 if found.problems else 0
