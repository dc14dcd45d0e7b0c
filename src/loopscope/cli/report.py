"""`loopscope report RUN [RUN...] -o report.html`: what a run saw, as one file for the browser."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from loopscope.analysis import open_run
from loopscope.cli.console import make_console, plain, working
from loopscope.cli.flags import RuleFlags


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(RuleFlags):
    """Write one HTML file that works offline: what is healthy and what is not, with the pictures.

    Works while a run is being written, after a crash, and on a run that has hardly begun.
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN...]")]
    """Folders of 1 to 8 runs; several are compared."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write; an existing one is replaced."""
    by: Literal["step", "tokens"] = "step"
    """What several runs are aligned by: optimizer steps or training tokens."""

    def run(self) -> int:
        """Write the file and print its findings and path; 0.

        Raises:
            NotARunError: a folder holds no run.
            ConfigError: no run or too many, or a wrong bound.
            StoreError: the file cannot be written.
        """
        from loopscope.report import write_report

        with working("writing the report"):
            parts = write_report(
                [open_run(path, partial=True) for path in self.paths],
                self.out,
                settings=self.bounds(),
                by=self.by,
            )
        console = make_console()
        for part in parts:
            # Names come from run.json: they are text, not markup.
            console.print(plain(f"{part.name}: {part.headline}"), markup=False)
            for found in part.findings.found:
                console.print(
                    plain(f"  {'over' if found.over else found.severity:<8}  {found.title}. {found.text}"),
                    markup=False,
                )
        print(self.out)
        return 0
