"""Reading runs: `open_run` for one, `open_runs` for many. Never imports torch."""

from loopscope.analysis.probes import compare_probes, require_same_corpus
from loopscope.analysis.run import Run, open_run
from loopscope.analysis.runs import Runs, open_runs

__all__ = ["Run", "Runs", "compare_probes", "open_run", "open_runs", "require_same_corpus"]
