"""Notebooks over runs that exist: no torch, nothing left behind. Their own trainings are run by `pytest --nbmake`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from notebook_cells import FOLDER, execute

from loopscope.store import RunStore, StoreOptions

_TRAIN = """
import shutil, sys
import sample_runs as s
small = {"steps": 16, "trace_every": 4, "probe_every": 16, "loops": 3}
recipes = {
    "whole": s.Recipe(deep=True, **small), "a-0": s.Recipe(**small), "a-1": s.Recipe(seed=1, **small),
    "b-0": s.Recipe(block="plain", **small), "b-1": s.Recipe(block="plain", seed=1, **small),
}
for name in sys.argv[2:]:
    shutil.copytree(s.train(name, recipes[name]), f"{sys.argv[1]}/{name}")
"""


def _train(root: Path, *names: str) -> Path:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _TRAIN, str(root), *names]
    subprocess.run(command, cwd=FOLDER, env=environment, check=True)
    return root


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the run "whole"."""
    return _train(tmp_path_factory.mktemp("run"), "whole")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("runs"), "whole", "a-0", "a-1", "b-0", "b-1")


def lying_about() -> dict[str, float]:
    """What lies in the notebooks' folder, and beside it."""
    found = {str(path): path.stat().st_mtime for path in FOLDER.rglob("*") if "__pycache__" not in path.parts}
    return found | {str(path): 0.0 for path in FOLDER.parent.iterdir() if not path.name.startswith(".")}


def test_a_run_is_read_without_torch_and_nothing_is_left(one_run: Path, tmp_path: Path) -> None:
    read_without_torch("first_look", {"LOOPSCOPE_RUN": "whole"}, one_run, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("is_my_loop_converging", {"LOOPSCOPE_RUN": "whole"}),
        ("which_experts_die", {"LOOPSCOPE_RUN": "whole"}),
        ("comparing_two_runs", {"LOOPSCOPE_RUN": "a-*", "LOOPSCOPE_OTHER": "b-*"}),
        ("a_thousand_runs", {"LOOPSCOPE_RUN": "*"}),
    ],
)
def test_runs_are_read_without_torch_and_nothing_is_left(
    name: str, given: dict[str, str], runs: Path, tmp_path: Path
) -> None:
    read_without_torch(name, given, runs, tmp_path)


def read_without_torch(name: str, given: dict[str, str], runs: Path, tmp_path: Path) -> None:
    before = lying_about()
    # Spark is the engines' test; starting Java here would test nothing else.
    said = execute(
        name,
        tmp_path,
        without=("torch", "torchtitan", "pyspark"),
        **{k: str(runs / v) for k, v in given.items()},
    )
    assert "TORCH False" in said
    assert said.count("'image/png'") >= (2 if name == "a_thousand_runs" else 4)
    assert lying_about() == before
    assert not list((tmp_path / "tmp").glob("loopscope-notebook-*"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["first_look", "is_my_loop_converging", "which_experts_die"])
def test_a_run_with_losses_alone_is_no_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunStore.create(path, options=StoreOptions(tick_s=3600.0, seal_in="thread")) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in (1, 2, 3):
            row = {
                "step": step,
                "task_loss": 3.0 / step,
                "aggregation_scope": "global",
                "elapsed_s": float(step),
            }
            writer.append("loss", row)
    execute(name, tmp_path, without=("torch",), LOOPSCOPE_RUN=str(path))


@pytest.mark.long
def test_two_single_runs_are_compared_and_the_missing_spread_is_said(runs: Path, tmp_path: Path) -> None:
    one, other = str(runs / "a-0"), str(runs / "b-0")
    said = execute(
        "comparing_two_runs", tmp_path, without=("torch",), LOOPSCOPE_RUN=one, LOOPSCOPE_OTHER=other
    )
    assert "A side has a single run" in said
    # A kernel gives up where a picture cannot be drawn; here it is printed.
    assert "Traceback" not in said


def test_without_a_run_and_without_torch_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Set LOOPSCOPE_RUN"):
        execute("first_look", tmp_path, without=("torch",))


@pytest.mark.long
def test_the_newest_run_is_taken(runs: Path, tmp_path: Path) -> None:
    newest = tmp_path / "runs" / "newest"
    newest.parent.mkdir()
    newest.symlink_to(runs / "whole")
    said = execute("first_look", tmp_path, without=("torch",), LOOPSCOPE_RUNS=str(newest.parent))
    assert said.startswith("whole, begun")


@pytest.mark.long
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"])
def test_what_a_notebook_made_goes_with_its_process_however_it_ends(end: str, tmp_path: Path) -> None:
    code = (
        f"import os, sample_runs as s; s.sweep(1); print(len(list(s.folder().iterdir())), flush=True); {end}"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, env=environment, text=True, capture_output=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "1", done.stderr
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
