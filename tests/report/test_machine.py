"""A slow step has a cause where a figure of the machine moved with it, and none where none did."""

import numpy as np
import pytest
from report_runs import Shape, generated_run

from loopscope import open_run
from loopscope.report.charts import machine
from loopscope.report.queries import RunQueries

STEPS, SLOW = 100, 60


def shape(**system):
    seconds = np.where(np.arange(1, STEPS + 1) == SLOW, 5.0, 1.0)
    return Shape(steps=STEPS, every=1, changes={"loss": {"elapsed_s": np.cumsum(seconds)}, "system": system})


def marks(path, run_shape):
    queries = RunQueries(open_run(generated_run(path, run_shape)))
    charts = {chart.id: chart for chart in machine.charts(queries)}
    return machine._slow(queries, machine._SECONDS.format(where="true")), charts


def test_the_figure_that_moved_while_a_slow_step_ran_stands_beside_it(tmp_path):
    gpu = [value for step in range(1, STEPS + 1) for value in (None, 12.0 if step == SLOW - 1 else 97.0)]
    (found, said), charts = marks(tmp_path / "run", shape(gpu_percent=gpu))
    assert found == [(SLOW, "5 times the median before; gpu_percent 12, usually 97")]
    assert "1 slow step, above 3 times the median" in said
    assert charts["step_time"].data["value"].to_pylist()[SLOW - 2] == pytest.approx(5.0)
    series = set(charts["machine_use"].data["series"].to_pylist())
    assert series == {"processors", "kernels of gpu0", "accelerator memory of gpu0"}
    assert set(charts["machine_io"].data["value"].to_pylist()) == {1e6, 2e6, 3e6, 4e6}


def test_no_cause_is_made_up(tmp_path):
    (found, said), _ = marks(tmp_path / "run", shape())
    assert found == [(SLOW, "5 times the median before")]
    assert said.endswith("No figure of the machine moved with them.")


def test_an_even_run_has_no_slow_step(tmp_path):
    (found, said), _ = marks(tmp_path / "run", Shape(steps=STEPS, every=1))
    assert (found, said) == ([], "No slow step: none is above 3 times the median of the 50 steps before.")
