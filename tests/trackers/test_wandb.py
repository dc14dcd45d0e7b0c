"""Offline runs of W&B, read back record by record."""

import math
from itertools import pairwise

import pytest
from toy_run import train
from tracker_helpers import history, records, visit_tables, wandb_config

from loopscope import Loopscope, open_run
from loopscope.alerts import AlertNotice
from loopscope.models.toy import ToyLoopMoE

NOTICE = AlertNotice(
    run_id="r", run_name="mine", attempt=1, step=40, rule="maxvio_count", severity="critical", subject="loop 2/1",
    since=20, title="One expert is far over its share", text="MaxVio 6 > 4.2", why="the maximum is E/k − 1",
)  # fmt: skip


def scalars(row):
    return {
        key: value for key, value in row.items() if key != "_step" and not key.startswith("loopscope/visits")
    }


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """12 steps, then again from step 8 to 15, with a probe in each attempt."""
    out = tmp_path_factory.mktemp("rolled") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
            patch.setenv("WANDB_" + name, value)
        train(out, last=12, probe_at=(6,), trackers=("wandb",), on_error="raise")
        train(out, first=8, last=15, probe_at=(9,), trackers=("wandb",), on_error="raise")
    return out


def test_a_rollback_drops_no_row(rolled_back):
    rows = history(rolled_back)
    by_attempt = [
        [r["loopscope/step"] for r in rows if r.get("loopscope/attempt") == n and "loss/task" in r]
        for n in (1, 2)
    ]
    assert by_attempt == [list(range(1, 13)), list(range(8, 16))]
    assert all("loopscope/step" in row for row in rows)


def test_a_resumed_attempt_goes_on_behind_the_earlier_ones_in_wandbs_own_steps(rolled_back):
    """Its offline folder is uploaded into the same W&B run, which takes rising steps only."""
    rows = history(rolled_back)
    steps = [row["_step"] for row in rows]
    assert all(before < after for before, after in pairwise(steps))
    first = next(row["_step"] for row in rows if row["loopscope/attempt"] == 2)
    # Behind every row of the first attempt, by not many times its number.
    assert 12 < first < 12 * 8


def test_a_first_attempt_begins_at_wandbs_step_0(rolled_back):
    assert history(rolled_back)[0]["_step"] == 0


def test_values_are_those_of_the_rows(rolled_back):
    run = open_run(rolled_back)
    rows = history(rolled_back)

    def of(key):
        return {(r["loopscope/attempt"], r["loopscope/step"]): r[key] for r in rows if key in r}

    def expected(sql):
        return {tuple(key): value for *key, value in run.sql(sql).fetchall()}

    for key, column in (("loss/task", "task_loss"), ("moe/lb_loss", "lb_loss"), ("optim/lr", "lr")):
        assert of(key) == expected(f"select attempt, step, {column} from loss_all")
    worst = "select attempt, step, max(maxvio_count) from router_all group by all"
    assert of("moe/maxvio_max") == expected(worst)
    assert of("moe/dead") == expected("select attempt, step, sum(dead_experts) from router_all group by all")
    assert of("probe/loss") == expected(
        "select attempt, step, loss_mean from probe_loss_all where stratum_kind = 'all'"
    )
    assert of("probe/loss").keys() == {(1, 6), (2, 9)}
    assert all(
        row["loopscope/tokens_seen"] == 12 * row["loopscope/step"] for row in rows if "loss/task" in row
    )


def test_scalars_have_their_own_step_as_x_axis(rolled_back):
    metrics = {
        r.metric.name: r.metric for r in records(rolled_back) if r.WhichOneof("record_type") == "metric"
    }
    logged = {key for row in history(rolled_back) for key in scalars(row)} - {"loopscope/step"}
    assert metrics.keys() == logged | {"loopscope/step"}
    assert {metrics[key].step_metric for key in logged} == {"loopscope/step"}


def test_both_attempts_are_one_wandb_run_which_names_the_run(rolled_back):
    run = open_run(rolled_back)
    ids = {r.run.run_id for r in records(rolled_back) if r.WhichOneof("record_type") == "run"}
    assert ids == {run.run_id}
    about = wandb_config(rolled_back)["loopscope"]
    assert (about["run_id"], about["path"], about["attempt"]) == (run.run_id, str(rolled_back), 2)
    assert about["config"]["trace_every"] == 3
    where = run.sql("select detail from health_all where event = 'tracker_started'").fetchall()
    assert all(f"wandb: run {run.run_id}, offline in {rolled_back}" in text for (text,) in where)


def test_visits_are_tables_and_not_keys(rolled_back):
    tables = visit_tables(rolled_back)
    steps = sorted(table["data"][0][0] for table in tables.values())
    assert steps == sorted([1, 2, 3, 4, 5, 7, 9, 12, *(8, 10, 15)])
    rows = open_run(rolled_back).sql(
        "select step, block, unrolled_pos, loop_step, layer_idx, maxvio_count from router where step = 7 order by 3"
    )
    (table,) = (t for t in tables.values() if t["data"][0][0] == 7)
    at = [table["columns"].index(name) for name in rows.columns]
    assert [tuple(row[i] for i in at) for row in table["data"]] == rows.fetchall()


def test_no_more_than_sixty_keys_however_deep_the_model(tmp_path):
    model = ToyLoopMoE(vocab_size=11, width=8, num_stacks=64)
    added = {}

    def own_metrics(scope):
        # 80 metrics of the user's own, at every visit.
        begin = scope.begin_attempt

        def and_report(**given):
            collector = begin(**given)
            for i in range(80):
                collector.record_event(1, f"custom:mine.{i}", "info", unrolled_pos=0, value=float(i))
            return added.setdefault("collector", collector)

        scope.begin_attempt = and_report

    train(tmp_path / "run", last=1, model=model, trackers=("wandb",), on_error="raise", prepare=own_metrics)
    keys = {
        key.partition("/_")[0] if "/visits/" not in key else "loopscope/visits"
        for row in history(tmp_path)
        for key in row
    }
    assert 30 < len(keys - {"_step"}) <= 60
    assert {"loss/task", "moe/maxvio_max", "loop/growth_last"} <= keys
    (table,) = (t for t in visit_tables(tmp_path).values() if t["data"][0][0] == 1)
    assert len(table["data"]) == 64 * 2 + 2
    told = (
        open_run(tmp_path / "run")
        .sql("select count, detail from health where event = 'tracker_keys'")
        .fetchall()
    )
    assert told[0][0] == told[-1][0] > 100
    assert "wandb: takes 60 keys at most; refused so far: custom/mine." in told[0][1]


def test_an_alert_is_a_wandb_alert(tmp_path):
    with Loopscope(Loopscope.Config(out=tmp_path / "run", trackers=("wandb",), on_error="raise")) as scope:
        scope.open(expected_visits=())
        scope.begin_attempt()
        scope.trackers.alert(NOTICE)
    (alert,) = (r.alert for r in records(tmp_path) if r.WhichOneof("record_type") == "alert")
    assert (alert.title, alert.level) == ("One expert is far over its share", "ERROR")
    for part in ("loop 2/1, since step 20: MaxVio 6 > 4.2", "the maximum is E/k", "step 40", "run_id r"):
        assert part in alert.text


def test_a_long_title_is_cut_as_wandb_wants_it(tmp_path):
    from dataclasses import replace

    with Loopscope(Loopscope.Config(out=tmp_path / "run", trackers=("wandb",), on_error="raise")) as scope:
        scope.open(expected_visits=())
        scope.begin_attempt()
        scope.trackers.alert(replace(NOTICE, title="x" * 100, severity="warn"))
    (alert,) = (r.alert for r in records(tmp_path) if r.WhichOneof("record_type") == "alert")
    assert (len(alert.title), alert.level) == (63, "WARN")


def test_a_run_that_the_script_started_is_shared_and_stays_open(tmp_path):
    import wandb

    mine = wandb.init(project="my-own", dir=str(tmp_path), id="my-own-id")
    train(tmp_path / "run", last=5, trackers=("wandb",), on_error="raise")
    assert wandb.run is mine
    mine.log({"after": 1})
    mine.finish()
    ids = {r.run.run_id for r in records(tmp_path) if r.WhichOneof("record_type") == "run"}
    assert ids == {"my-own-id"}
    rows = history(tmp_path)
    assert [row["loopscope/step"] for row in rows if "loss/task" in row] == [1, 2, 3, 4, 5]
    assert any("after" in row for row in rows)


def test_the_environments_word_counts(tmp_path, monkeypatch):
    for name, value in {"PROJECT": "theirs", "NAME": "their-name", "RUN_ID": "their-id"}.items():
        monkeypatch.setenv("WANDB_" + name, value)
    train(tmp_path / "run", last=1, trackers=("wandb",), on_error="raise")
    (run, *_) = (r.run for r in records(tmp_path) if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, run.run_id) == ("theirs", "their-name", "their-id")


def test_values_that_are_not_finite_are_no_failure_and_an_alert(tmp_path):
    from loopscope import LossComponents

    nan = LossComponents(
        task_loss=math.nan,
        lb_loss=1.0,
        lb_loss_factor=0.0,
        z_loss=0.0,
        z_loss_factor=0.0,
        total_loss=math.nan,
    )
    with Loopscope(Loopscope.Config(out=tmp_path / "run", trackers=("wandb",))) as scope:
        scope.open(expected_visits=())
        scope.begin_attempt().on_metrics_step(1, nan, 1.0, 0.1)
    (row,) = history(tmp_path)
    assert row["optim/grad_norm"] == 1.0
    events = open_run(tmp_path / "run").sql("select event from health").fetchall()
    assert ("tracker_failed",) not in events
    # The rules found it in the last row there was, and told it through the tracker before that was closed.
    alerts = [r.alert for r in records(tmp_path) if r.WhichOneof("record_type") == "alert"]
    assert ("Values are not finite", "ERROR") in {(alert.title, alert.level) for alert in alerts}
