"""The loss of a run on several ranks is that of all of them, and a rank that fails waits for nobody."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from loopscope import open_run

pytestmark = pytest.mark.ranks

STEPS, MICROBATCHES = 3, 2  # of the job
JOB = Path(__file__).with_name("loss_ranks_job.py")


def test_the_loss_is_the_mean_over_ranks(tmp_path: Path, rank_processes: Any) -> None:
    statuses, output = rank_processes.run(JOB, str(tmp_path / "run"), "clean", ranks=2)
    assert statuses == [0, 0], output
    by_rank = json.loads(output.partition("FOUND ")[2].splitlines()[0])
    rows = open_run(tmp_path / "run").arrow("loss").to_pylist()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for row in rows:
        of_step = [each for rank in by_rank for each in rank if each[0] == row["step"]]
        assert len(of_step) == 2 * MICROBATCHES
        total, balancing = (fmean(each[column] for each in of_step) for column in (1, 2))
        assert math.isclose(row["total_loss"], total, rel_tol=1e-6)
        assert math.isclose(row["lb_loss"], balancing / 2, rel_tol=1e-6)  # transformers' is k times ours
        assert math.isclose(row["task_loss"], total - 0.1 * balancing, rel_tol=1e-6)


def test_a_rank_that_fails_within_a_step_ends_by_its_own_error(tmp_path: Path, rank_processes: Any) -> None:
    statuses, output = rank_processes.run(JOB, str(tmp_path / "run"), "one raises", ranks=2)
    assert "ValueError: no more data" in output
    assert statuses[1] != 0
    run = open_run(tmp_path / "run")
    assert [row["step"] for row in run.arrow("loss").to_pylist()] == [1]  # later ones were not merged
    assert {row["step"] for row in run.arrow("router").to_pylist()} == {1, 2}
