"""`loopscope summary`: what a run saw, as tables in the terminal."""

from dataclasses import dataclass

from rich.console import Group

from loopscope.analysis import open_run
from loopscope.cli.console import make_console, working
from loopscope.cli.flags import RunFlag
from loopscope.cli.sections import health, identity, loop, loss, probe, router

_SECTIONS = (
    identity.section, loss.section, router.section, loop.section, probe.losses, probe.overlap, probe.deep,
    health.section,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary(RunFlag):
    """Show what a run saw: losses, the worst visits, loop convergence, the probe, health.

    Works while the run is being written, after a crash, and on a run that has hardly begun.
    """

    def run(self) -> int:
        """Print the summary; 0.

        Raises:
            NotARunError: `path` holds no run.
        """
        console = make_console()
        with working("reading the run"):
            run = open_run(self.path, partial=True)
            parts = [Group(*section(run)) for section in _SECTIONS]
        for index, part in enumerate(parts):
            if index:
                console.print()
            console.print(part)
        return 0
