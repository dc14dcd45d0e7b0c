"""Hysteresis, warm-up and windows of the alert engine."""

from itertools import pairwise

import pytest
from alert_runs import observe
from hypothesis import given
from hypothesis import strategies as st

from loopscope.alerts import AlertEngine, AlertSettings

S = AlertSettings(warmup_steps=10, sustain=3, dead_expected=100.0)


def visit(entropy=1.0, **more):
    return {
        "block": "head", "unrolled_pos": 0, "num_experts": 4, "top_k": 1, "num_tokens": 400,
        "load_entropy_ratio": entropy, **more,
    }  # fmt: skip


def feed(engine, entropies, start=11):
    for step, entropy in enumerate(entropies, start):
        observe(engine, "router", step, [visit(entropy)])
    return [(a.since, a.fired, a.cleared, a.severity) for a in engine.alerts]


def test_one_spike_is_no_alert():
    assert feed(AlertEngine(S), [1, 0.1, 1, 0.1, 0.1, 1, 0.1]) == []


def test_an_alert_fires_once_lasts_and_ends_at_80_percent_of_the_bound():
    # bound 0.8: a shortfall of 0.2; back at 0.16, that is 0.84
    assert feed(AlertEngine(S), [0.7, 0.7, 0.7, 0.83, 0.7]) == [(11, 13, None, "warn")]
    assert feed(AlertEngine(S), [0.7, 0.7, 0.7, 0.85, 0.7]) == [(11, 13, 14, "warn")]


def test_warm_up_is_not_judged_but_closure_is():
    engine = AlertEngine(S)
    assert feed(engine, [0.1] * 10, start=1) == []
    for step in (1, 2, 3):
        observe(engine, "loss", step, [{"closure_error": 0.1, "total_loss": 1.0}])
    assert [(a.rule, a.fired) for a in engine.alerts] == [("closure", 3)]


def test_critical_must_last_as_well():
    assert feed(AlertEngine(S), [0.7, 0.7, 0.1, 0.7, 0.1, 0.1])[0][3] == "warn"
    assert feed(AlertEngine(S), [0.7, 0.1, 0.1, 0.1])[0][3] == "critical"


def test_an_expert_is_dead_when_the_same_one_stays_empty():
    engine = AlertEngine(S)
    turns = [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    for step, counts in enumerate(turns * 2, 11):
        observe(engine, "router", step, [visit(dead_experts=1, expert_count=counts)])
    assert engine.alerts == []
    for step in range(20, 23):
        observe(engine, "router", step, [visit(dead_experts=1, expert_count=[5, 5, 0, 5])])
    # Since it stopped, not since the window was full.
    assert [(a.rule, a.since, a.fired) for a in engine.alerts] == [("dead_expert", 20, 22)]
    assert "expert 2 of 4" in engine.alerts[0].text
    observe(engine, "router", 23, [visit(dead_experts=0, expert_count=None)])
    assert engine.active == []


def test_an_empty_expert_of_few_tokens_may_be_chance():
    engine = AlertEngine(S)
    # 20 tokens, k/E = 1/4: 5 a trace; 100 are due after 20 traces
    for step in range(11, 31):
        observe(engine, "router", step, [visit(num_tokens=20, dead_experts=1, expert_count=[0, 9, 9, 2])])
        assert bool(engine.alerts) is (step == 30)


def boundary(delta, growth=1.0, loop_step=1):
    return {
        "kind": "step_boundary", "to_layer_idx": 0, "to_loop_step": loop_step, "relative_delta": delta,
        "growth": growth,
    }  # fmt: skip


def test_the_loop_is_compared_with_its_own_best():
    engine = AlertEngine(S)
    for step, delta in enumerate([0.5, 0.2, 0.2, 0.2, 0.29, 0.31, 0.31], 11):
        observe(engine, "transition", step, [boundary(delta)])
    assert engine.alerts == []
    fired = observe(engine, "transition", 18, [boundary(0.31)])
    assert [(a.rule, a.since) for a in fired] == [("loop_delta", 16)]


def test_a_loop_of_another_depth_is_another_loop():
    engine = AlertEngine(S)
    for step in range(11, 31):
        depth = 2 if step % 2 else 4
        observe(engine, "transition", step, [boundary(0.1 * depth, loop_step=depth)])
    assert engine.alerts == []


def test_an_event_fires_at_once_and_is_counted():
    engine = AlertEngine()
    row = {"event": "nonfinite", "severity": "critical", "unrolled_pos": 3, "detail": "2 logits"}
    assert [a.rule for a in observe(engine, "health", 1, [row])] == ["nonfinite"]
    assert observe(engine, "health", 2, [row]) == []
    assert engine.alerts[0].count == 2


def test_unknown_tables_and_rows_without_values_say_nothing():
    engine = AlertEngine(AlertSettings(warmup_steps=0, sustain=1))
    for table in ("loss", "router", "residual", "transition", "health", "probe_loss"):
        observe(engine, table, 1, [])
    observe(engine, "loss", 1, [{}])
    observe(engine, "router", 1, [{"block": "tail", "unrolled_pos": 0}])
    observe(engine, "residual", 1, [{"block": "loop", "unrolled_pos": 0}])
    observe(engine, "transition", 1, [boundary(None, None)])
    assert engine.alerts == []


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 5))
def test_alerts_of_one_visit_never_overlap_and_each_had_its_streak(entropies, sustain):
    engine = AlertEngine(AlertSettings(warmup_steps=0, sustain=sustain))
    feed(engine, entropies, start=1)
    alerts = [a for a in engine.alerts if a.rule == "load_entropy"]
    for alert in alerts:
        broken = [s for s, e in enumerate(entropies, 1) if e < 0.8 and alert.since <= s <= alert.fired]
        assert len(broken) >= sustain
    for earlier, later in pairwise(alerts):
        assert earlier.cleared is not None
        assert earlier.cleared < later.since


@pytest.mark.parametrize("split", [1, 7])
def test_feeding_in_pieces_gives_the_same_alerts(split):
    entropies = [0.7, 0.7, 0.7, 0.9, 0.1, 0.1, 0.1, 0.5]
    whole, pieces = AlertEngine(S), AlertEngine(S)
    feed(whole, entropies)
    feed(pieces, entropies[:split])
    feed(pieces, entropies[split:], start=11 + split)
    assert whole.alerts == pieces.alerts
