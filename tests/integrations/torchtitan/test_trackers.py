"""torchtitan's own W&B and TensorBoard switched on: one run, one folder, the values of the rows, never a crash."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tracker_helpers import events, history, records, visit_tables, wandb_config

from loopscope.errors import ConfigError
from loopscope.integrations.torchtitan.trackers import tracker_names

pytestmark = pytest.mark.ranks

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_ERROR_REPORTING": "false",
}
NO_KEY = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
METRICS = {"enable_wandb": True, "enable_tensorboard": True, "log_freq": 3}
BASE = {"steps": 7, "loopscope": {"trace_every": 5, "probe_every": 4}}
TRACKED = {**BASE, "metrics": METRICS}


def run_all(trainings, scenarios, ranks, home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.delenv("WANDB_API_KEY", raising=False)
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        return trainings(scenarios, ranks=ranks)


@pytest.fixture(scope="module")
def finished(trainings, tmp_path_factory):
    return run_all(
        trainings,
        [
            {"name": "without", **BASE},
            {"name": "tracked", **TRACKED},
            {"name": "dying", **TRACKED, "hook": "tracker_hooks", "calls": 4},
            {"name": "no-key", **TRACKED, "before": "tracker_hooks", "env": NO_KEY},
        ],
        ranks=1,
        home=tmp_path_factory.mktemp("home"),
    )


def tensorboard_folder(finished, name):
    (folder,) = (finished.root / name / "torchtitan" / "tb").iterdir()
    return folder


def rows_by_step(finished, name, sql, which="true"):
    return dict(finished.run(name).sql(sql.format(which=which)).fetchall())


EXPECTED = {
    "loss/task": "select step, task_loss from loss where {which}",
    "optim/grad_norm": "select step, grad_norm from loss where {which}",
    "moe/maxvio_max": "select step, max(maxvio_count) from router where {which} group by 1",
    "moe/load_entropy_min": "select step, min(load_entropy_ratio) from router where {which} group by 1",
    "health/coverage": "select step, value from health where event = 'coverage' and {which}",
    "probe/loss": "select step, loss_mean from probe_loss where stratum_kind = 'all' and {which}",
}


@pytest.mark.parametrize("key", EXPECTED)
def test_values_in_the_wandb_run_are_those_of_the_rows(finished, key):
    expected = rows_by_step(finished, "tracked", EXPECTED[key])
    assert len(expected) >= 3
    found = [(r["loopscope/step"], r[key]) for r in history(finished.root / "tracked") if key in r]
    assert found == sorted(expected.items())


@pytest.mark.parametrize("key", EXPECTED)
def test_values_in_tensorboard_are_those_of_the_rows(finished, key):
    expected = rows_by_step(finished, "tracked", EXPECTED[key])
    found = {e.step: e.value for e in events(tensorboard_folder(finished, "tracked")).Scalars(key)}
    assert found == pytest.approx(expected, rel=1e-6)


def test_there_is_one_run_and_one_folder_with_torchtitans_values_in_them(finished):
    out = finished.root / "tracked"
    assert len(list(out.glob("**/*.wandb"))) == 1
    assert len(list(out.glob("**/events.out.tfevents*"))) == 1
    rows = history(out)
    logged = [row["_step"] for row in rows if "loss_metrics/global_avg_loss" in row]
    assert logged == [1, 3, 6]
    # Beside a row of torchtitan's are values of ours of the same step, or none.
    assert all(row.get("loopscope/step", row["_step"]) == row["_step"] for row in rows if "grad_norm" in row)
    theirs = events(tensorboard_folder(finished, "tracked")).Scalars("loss_metrics/global_avg_loss")
    assert [event.step for event in theirs] == [1, 3, 6]


def test_at_most_sixty_keys_torchtitans_included(finished):
    rows = history(finished.root / "tracked")
    keys = {"loopscope/visits" if key.startswith("loopscope/visits/") else key for row in rows for key in row}
    assert len(keys - {"_step"}) <= 60
    tags = events(tensorboard_folder(finished, "tracked")).Tags()
    assert len(tags["scalars"]) + len(tags["histograms"]) + len(tags["tensors"]) <= 60


def test_tables_and_the_runs_identity_are_there(finished):
    run = finished.run("tracked")
    about = wandb_config(finished.root / "tracked")["loopscope"]
    assert (about["run_id"], Path(about["path"])) == (run.run_id, (finished.root / "tracked").resolve())
    assert len(visit_tables(finished.root / "tracked")) == 6  # of steps 1, 2, 3, 4, 5, 7
    assert run.manifest.configuration["loopscope"]["trackers"] == ["wandb", "tensorboard"]


@pytest.mark.parametrize("name", ["tracked", "dying", "no-key"])
def test_the_training_is_the_same_bit_by_bit_and_its_rows_are_complete(finished, name):
    (without,), (with_,) = finished["without"], finished[name]
    for what in ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng"):
        assert with_[what] == without[what], what
    for table in ("loss", "router", "residual", "transition", "probe_loss", "probe_router"):
        sql = f"select * exclude (run_id, elapsed_s, wall_time) from {table} order by all"
        rows = finished.run(name).sql(sql).fetchall()
        assert rows
        assert repr(rows) == repr(finished.run("without").sql(sql).fetchall())


def failures(finished, name):
    sql = "select detail from health where event = 'tracker_failed' and severity = 'warn'"
    return sorted(text for (text,) in finished.run(name).sql(sql).fetchall())


def test_what_fails_is_in_the_health_table(finished):
    assert failures(finished, "without") == failures(finished, "tracked") == []
    ours_lost, ours_off, theirs = sorted(failures(finished, "dying"), key=lambda text: "torchtitan" in text)
    assert "wandb: lost the values of a step: BrokenPipeError: the service is gone" in ours_off + ours_lost
    assert "wandb: is off after 3 failures in a row" in ours_off + ours_lost
    assert "wandb: torchtitan's logger lost the values of step" in theirs
    (not_started,) = failures(finished, "no-key")
    assert "wandb: did not start, and is off: LoopscopeError: torchtitan did not start wandb" in not_started


def test_a_tracker_that_fails_costs_the_other_nothing(finished):
    for name in ("dying", "no-key"):
        found = events(tensorboard_folder(finished, name))
        assert [event.step for event in found.Scalars("loss/task")] == list(range(1, 8))


def test_two_ranks_one_writes_and_rows_are_global(trainings, tmp_path_factory):
    loopscope = {**BASE["loopscope"], "per_rank": True}
    finished = run_all(
        trainings,
        [{"name": "two", **TRACKED, "steps": 4, "loopscope": loopscope}],
        ranks=2,
        home=tmp_path_factory.mktemp("home"),
    )
    out = finished.root / "two"
    assert len(list(out.glob("**/*.wandb"))) == len(list(out.glob("**/events.out.tfevents*"))) == 1
    for key, sql in EXPECTED.items():
        found = [(r["loopscope/step"], r[key]) for r in history(out) if key in r]
        assert found == sorted(rows_by_step(finished, "two", sql, "rank is null").items()), key
    runs = {r.run.run_id for r in records(out) if r.WhichOneof("record_type") == "run"}
    assert len(runs) == 1


def config(wandb=False, tensorboard=False, trackers=()):
    metrics = SimpleNamespace(enable_wandb=wandb, enable_tensorboard=tensorboard)
    return SimpleNamespace(metrics=metrics, loopscope=SimpleNamespace(trackers=trackers))


def test_torchtitans_switches_decide():
    assert tracker_names(config()) == ()
    assert tracker_names(config(wandb=True, tensorboard=True)) == ("wandb", "tensorboard")
    assert tracker_names(config(wandb=True, trackers=("theirs", "wandb"))) == ("wandb", "theirs")
    with pytest.raises(ConfigError, match=r"--metrics\.enable-tensorboard"):
        tracker_names(config(wandb=True, trackers=("tensorboard",)))
