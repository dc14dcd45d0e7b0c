"""`loopscope seal RUN`: turn what is left in journals into Parquet parts."""

from dataclasses import dataclass

from loopscope.cli.console import make_console, working
from loopscope.cli.flags import RunFlag
from loopscope.store.seal.seal_run import seal_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal(RunFlag):
    """Turn a run's journals into Parquet parts, and write the table of attempts anew.

    Readers of loopscope need no sealing; other engines read Parquet only. Journals that a living process writes are
    left alone. A run.json that is missing or damaged is put together from the rows. Exit status 0: everything else
    is sealed; 1: something could not be, and is named.
    """

    def run(self) -> int:
        """Seal and report."""
        with working("sealing"):
            report = seal_run(self.path)
        console = make_console()
        if report.restored is not None:
            console.print(f"run.json was put together from the rows: {report.restored}", markup=False)
        for sealed in report.sealed:
            lost = f", {sealed.lost} row(s) lost" if sealed.lost else ""
            console.print(
                f"sealed {sealed.journal}: {sealed.rows} row(s), {len(sealed.parts)} part(s){lost}",
                markup=False,
            )
            for fault in sealed.faults:
                console.print(f"  damaged: {fault}", markup=False)
        for name in report.busy:
            console.print(f"left alone {name}: a process is writing it", markup=False)
        for failure in report.failures:
            console.print(f"failed {failure}", markup=False)
        if not (report.sealed or report.busy or report.failures or report.restored):
            console.print("nothing to seal")
        return 1 if report.failures or any(s.lost for s in report.sealed) else 0
