"""Reading runs: `open_run` for one, `open_runs` for many, and questions that are asked of both. Never imports torch."""

from loopscope.analysis.compare import differences, settings_between, window_of
from loopscope.analysis.expert_deaths import expert_deaths
from loopscope.analysis.health_findings import findings
from loopscope.analysis.layer_load import layer_load
from loopscope.analysis.probes import compare_probes, require_same_corpus
from loopscope.analysis.run import Run, open_run
from loopscope.analysis.runs import Runs, open_runs
from loopscope.analysis.scope import scope_of

__all__ = [
    "Run",
    "Runs",
    "compare_probes",
    "differences",
    "expert_deaths",
    "findings",
    "layer_load",
    "open_run",
    "open_runs",
    "require_same_corpus",
    "scope_of",
    "settings_between",
    "window_of",
]
