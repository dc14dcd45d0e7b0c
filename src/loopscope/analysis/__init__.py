"""Reading runs: `open_run` for one, `open_runs` for many. Never imports torch."""

from loopscope.analysis.run import Run, open_run
from loopscope.analysis.runs import Runs, open_runs

__all__ = ["Run", "Runs", "open_run", "open_runs"]
