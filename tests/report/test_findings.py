"""Sick runs are named rightly, healthy ones are left alone."""

from dataclasses import replace

import numpy as np
import pytest
from report_runs import Shape, generated_run

from loopscope import open_run
from loopscope.alerts import RULES, AlertEngine, AlertSettings
from loopscope.analysis.health_findings import findings, replay
from loopscope.report.checks import _READ
from loopscope.report.queries import RunQueries

SHAPE = Shape(steps=1500, every=10, loops=8, layers=1)
TRACES = SHAPE.steps // SHAPE.every


def found(path, table=None, **columns):
    changes = {table: columns} if table else {}
    return findings(open_run(generated_run(path / "run", replace(SHAPE, changes=changes))))


def test_a_healthy_run_has_no_finding(tmp_path):
    result = found(tmp_path)
    assert (result.found, result.early, result.state) == ((), (), "ok")
    assert result.judged == "Judged over steps 1001 to 1500."


def test_entries_that_are_not_finite_are_found_where_no_event_tells_of_them(tmp_path):
    rows = TRACES * (SHAPE.loops + 2)
    result = found(tmp_path, "router", nonfinite_count=np.where(np.arange(rows) == 700, 3, 0))
    (finding,) = result.found
    assert (finding.rule, finding.severity, result.state) == ("nonfinite", "critical", "critical")
    assert finding.text == "3 values of the rows, in router.nonfinite_count."


def test_dead_experts(tmp_path):
    visits = SHAPE.loops + 2
    rows = TRACES * visits
    counts = np.full((rows, 8), 1024)
    counts[3::visits, [2, 5]] = 0
    dead = (counts == 0).sum(1)
    result = found(tmp_path, "router", expert_count=counts.tolist(), dead_experts=dead)
    assert [f.rule for f in result.found] == ["dead_expert"]
    assert result.found[0].title == "Experts get no tokens"
    assert "Loop step 2, layer 0, since step 1010; still so at step 1500" in result.found[0].text
    assert "2 experts (2, 5) of 8" in result.found[0].text


def test_a_loop_that_keeps_growing(tmp_path):
    growth = np.random.default_rng(0).normal(1.2, 1e-3, TRACES * (SHAPE.loops - 1))
    result = found(tmp_path, "transition", growth=growth)
    assert [f.rule for f in result.found] == ["loop_growth"]
    assert "keeps growing" in result.found[0].title


@pytest.mark.parametrize(
    ("times", "words"), [(1, "lb_loss) is counted twice"), (-1, "lb_loss) is counted not at all")]
)
def test_an_auxiliary_loss_counted_wrongly(tmp_path, times, words):
    result = found(
        tmp_path, "loss", closure_error=np.full(1500, times * 0.01 * 1.02), lb_loss=np.full(1500, 1.02)
    )
    assert [(f.rule, f.severity) for f in result.found] == [("closure", "critical")]
    assert words in result.found[0].text
    assert result.state == "critical"


def test_a_closure_error_is_found_in_a_young_run(tmp_path):
    shape = replace(SHAPE, steps=40, changes={"loss": {"closure_error": np.full(40, 0.1)}})
    result = findings(open_run(generated_run(tmp_path / "run", shape)))
    assert [f.rule for f in result.found] == ["closure"]


def test_a_young_run_is_told_apart_from_a_healthy_one(tmp_path):
    shape = replace(SHAPE, steps=200)
    visits = SHAPE.loops + 2
    low = np.where(np.arange(20 * visits) % visits == 4, 0.3, 1.0)
    result = findings(
        open_run(
            generated_run(tmp_path / "run", replace(shape, changes={"router": {"load_entropy_ratio": low}}))
        )
    )
    assert (result.state, result.found) == ("young", ())
    assert [f.rule for f in result.early] == ["load_entropy"]
    assert "0 traces after its warm-up of 1000 steps" in result.judged


def test_what_ended_is_said_to_be_over(tmp_path):
    visits = SHAPE.loops + 2
    entropy = np.ones((TRACES, visits))
    entropy[101:125, 1] = 0.6
    result = found(tmp_path, "router", load_entropy_ratio=entropy.ravel())
    assert [(f.rule, f.over) for f in result.found] == [("load_entropy", True)]
    assert "since step 1020; over since step 1260" in result.found[0].text
    assert result.state == "ok"


def test_an_event_is_a_finding_from_the_first_step_on(tmp_path):
    severity = np.where(np.arange(2 * TRACES) == 6, "warn", "info")
    result = found(tmp_path, "health", severity=severity.tolist(), detail="visits 3 and 4 missing")
    assert [f.rule for f in result.found] == ["coverage"]
    assert "1 event at step 40" in result.found[0].text
    assert "visits 3 and 4 missing" in result.found[0].text


def beside_the_training(run, settings):
    """The engine that sees a run's rows a step at a time."""
    engine = AlertEngine(settings)
    steps: dict[int, dict[str, list]] = {}
    for table in ("loss", "router", "residual", "transition", "health"):
        for row in run.arrow(table).to_pylist():
            steps.setdefault(row["step"], {}).setdefault(table, []).append(row)
    for step in sorted(steps):
        for table, rows in steps[step].items():
            engine.observe_rows(table, rows)
    return engine


def test_replay_gives_what_the_engine_gave_beside_the_training(tmp_path):
    visits = SHAPE.loops + 2
    generator = np.random.default_rng(3)
    entropy = np.clip(generator.normal(0.78, 0.05, (TRACES, visits)), 0, 1)
    entropy[:, :4] = 1.0
    settings = AlertSettings(warmup_steps=100, sustain=5)
    path = generated_run(
        tmp_path / "run", replace(SHAPE, changes={"router": {"load_entropy_ratio": entropy.ravel()}})
    )
    run = open_run(path)
    engine = beside_the_training(run, settings)
    live = sorted(engine.alerts, key=lambda a: (a.rule, a.subject, a.fired))
    again = sorted(replay(run, settings), key=lambda a: (a.rule, a.subject, a.fired))
    assert len(live) > 3
    assert again == live


def test_every_rule_says_the_same_beside_the_training_in_a_replay_and_in_the_report(tmp_path):
    shape = Shape(steps=40, every=5, loops=4, layers=1)
    traces, visits, pairs = 8, shape.loops + 2, shape.loops - 1
    counts = np.full((visits, shape.experts), 1024)
    counts[2, [1, 5]], counts[4, 3] = 0, 0
    sick = np.linspace(0.5, 1.0, visits)
    events = ["coverage", "timing"] * traces
    events[3], events[5], events[7], events[9] = (
        "nonfinite",
        "dropped_rows",
        "index_out_of_range",
        "brand_new",
    )
    noticed = np.isin(np.arange(2 * traces), (0, 3, 5, 7, 9))
    changes = {
        "loss": {"closure_error": 0.01 + np.arange(40) / 1e4, "nonfinite_fields": [None] * 39 + ["lb_loss"]},
        "router": {
            "load_entropy_ratio": np.tile(sick * 0.6, traces), "maxvio_count": np.tile(sick * 3, traces),
            "token_entropy_ratio": np.tile(sick / 30, traces), "mutual_information": np.tile(sick / 30, traces),
            "z_mean": np.tile(sick * 20, traces), "logit_abs_max": np.tile(sick * 90, traces),
            "expert_count": np.tile(counts, (traces, 1)).tolist(),
            "dead_experts": np.tile((counts == 0).sum(1), traces),
        },
        "residual": {"token_correlation": np.tile(0.9 + sick / 10, traces)},
        "transition": {
            "growth": np.tile([1.2, 1.25, 1.3], traces),
            "relative_delta": np.repeat([0.2, 0.8], traces // 2 * pairs),
        },
        "health": {"event": events, "severity": np.where(noticed, "warn", "info").tolist()},
    }  # fmt: skip
    run = open_run(generated_run(tmp_path / "run", replace(shape, changes=changes)))
    settings = AlertSettings(warmup_steps=0, sustain=4, dead_expected=10.0)
    again = replay(run, settings)
    live = beside_the_training(run, settings).alerts
    assert {alert.rule for alert in again} == set(RULES) - {"files"}
    assert sorted(live, key=lambda a: (a.rule, a.subject)) == sorted(again, key=lambda a: (a.rule, a.subject))
    look = RunQueries(run, settings)
    for name in [rule.name for rule in RULES.values() if not rule.at_once]:
        worst = max(alert.worst for alert in again if alert.rule == name)
        assert _READ[name](look, settings).excess == pytest.approx(worst, rel=1e-4), name
