"""The alert rules in a run: stored, resumed, told through trackers, and never in the way."""

import json

import pytest

from loopscope import AlertConfig, AlertSettings, Loopscope, LossComponents, open_run
from loopscope.alerts import replay as stored
from loopscope.analysis.health_findings import replay
from loopscope.collect import ObservedWriter
from loopscope.errors import ConfigError

RULES = AlertSettings(sustain=3)


def loss(wrong=True):
    """A step's loss; `wrong` counts the load-balancing loss twice."""
    return LossComponents(
        task_loss=2.0, lb_loss=1.0, lb_loss_factor=0.1, z_loss=0.0, z_loss_factor=0.0,
        total_loss=2.2 if wrong else 2.1,
    )  # fmt: skip


def attempt(out, steps, *, first_step=1, resume=False, before=None, wrong=lambda step: True, **config):
    config = Loopscope.Config(out=out, resume=resume, alerts=AlertConfig(**{"rules": RULES, **config}))
    with Loopscope(config) as scope:
        scope.open(expected_visits=())
        parent = {"parent_run_id": scope.run_id, "parent_attempt": 1} if resume else {}
        collector = scope.begin_attempt(first_step=first_step, **parent)
        if before:
            before(scope)
        for step in range(first_step, first_step + steps):
            scope.begin_step(step)
            collector.on_metrics_step(step, loss(wrong(step)))
        return scope, collector._rows.writer


def alerts(out):
    query = "select step, attempt, severity, detail from health where event = 'alert' order by step"
    return open_run(out).sql(query).fetchall()


def test_the_bounds_are_the_runs_own_for_whoever_reads_it(tmp_path):
    attempt(tmp_path / "run", 5)
    ((step, number, severity, detail),) = alerts(tmp_path / "run")
    assert (step, number, severity) == (3, 1, "critical")
    assert "lb_loss) is counted twice" in detail
    (found,) = replay(open_run(tmp_path / "run"))
    assert (found.rule, found.since, found.fired) == ("closure", 1, 3)
    assert replay(open_run(tmp_path / "run"), AlertSettings()) == []


def test_a_streak_goes_on_across_a_resume_and_is_told_once(tmp_path):
    attempt(tmp_path / "run", 2)
    attempt(tmp_path / "run", 2, first_step=3, resume=True)
    assert [(row[0], row[1]) for row in alerts(tmp_path / "run")] == [(3, 2)]
    attempt(tmp_path / "run", 5, first_step=5, resume=True)
    # Attempt 3 went on from attempt 1's checkpoint, so that attempt 2's rows, and its alert, are superseded.
    assert [(row[0], row[1]) for row in alerts(tmp_path / "run")] == [(5, 3)]


def test_a_resume_with_other_bounds_is_judged_by_the_newest(tmp_path):
    out = tmp_path / "run"
    attempt(out, 2)
    attempt(
        out,
        2,
        first_step=3,
        resume=True,
        rules=AlertSettings(sustain=4, off=("z",)),
        webhook="http://127.0.0.1:9/x",
    )
    stored = json.loads((out / "run.json").read_text())["configuration"]["loopscope"]["alerts"]
    assert (stored["rules"]["sustain"], stored["rules"]["off"], stored["webhook"]) == (
        4,
        ["z"],
        "http://127.0.0.1:9/***",
    )
    assert [alert.fired for alert in replay(open_run(out)) if alert.rule == "closure"] == [4]


def test_a_past_that_cannot_be_read_is_an_event_and_stops_nothing(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("the disk is gone")

    attempt(tmp_path / "run", 2)
    monkeypatch.setattr(stored, "state_before", broken)
    attempt(tmp_path / "run", 3, first_step=3, resume=True)
    run = open_run(tmp_path / "run")
    (row,) = run.sql("select step, detail from health where event = 'alerts_without_past'").fetchall()
    assert row == (3, "OSError: the disk is gone")
    assert [row[0] for row in alerts(tmp_path / "run")] == [5]


def test_without_rules_nothing_is_judged_and_a_reader_still_can(tmp_path):
    _, writer = attempt(tmp_path / "run", 5, enabled=False)
    assert not isinstance(writer, ObservedWriter)
    assert alerts(tmp_path / "run") == []
    assert len(replay(open_run(tmp_path / "run"))) == 1


def test_what_cannot_be_told_stops_the_run_before_it_is_there(tmp_path):
    with pytest.raises(ConfigError, match="not a program"):
        attempt(tmp_path / "run", 1, command=("no-such-program-anywhere",))
    assert not (tmp_path / "run").exists()


def test_trackers_hear_the_notices_and_the_end_waits_for_them(tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = Loopscope.Config(
        out=tmp_path / "run", alerts=AlertConfig(rules=RULES), trackers=("tensorboard",)
    )
    with Loopscope(config) as scope:
        scope.open(expected_visits=())
        collector = scope.begin_attempt()
        for step in range(1, 4):
            scope.begin_step(step)
            collector.on_metrics_step(step, loss())
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents*")}
    found = tensorboard.EventAccumulator(str(folder)).Reload()
    (told,) = found.Tensors("loopscope/alerts/text_summary")
    assert told.step == 3
    assert b"The total loss is not the sum of its parts" in told.tensor_proto.string_val[0]
