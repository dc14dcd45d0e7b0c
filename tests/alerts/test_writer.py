"""The rules beside the training: rows go through untouched, alerts become health rows and lines of the log."""

import logging

import pytest

from loopscope.alerts import AlertEngine, AlertingWriter, AlertSettings
from loopscope.collect.writer import MemoryWriter, RowWriter

S = AlertSettings(warmup_steps=0, sustain=3)


def visit(step, entropy, position=0, **more):
    return {
        "step": step, "run_id": "r", "attempt": 1, "block": "head", "unrolled_pos": position, "num_experts": 4,
        "top_k": 1, "num_tokens": 400, "load_entropy_ratio": entropy, "aggregation_scope": "global",
    } | more  # fmt: skip


def test_it_is_a_writer_that_changes_no_row():
    inner = MemoryWriter()
    writer = AlertingWriter(inner)
    assert isinstance(writer, RowWriter)
    rows = [visit(step, 0.9) for step in range(5)]
    for row in rows:
        writer.append("router", row)
    writer.append("anything", {"step": 1})
    writer.flush(durable=True)
    writer.close()
    assert inner.tables == {"router": rows, "anything": [{"step": 1}]}
    assert (inner.flushes, inner.closed, writer.dropped) == (1, True, 0)


def test_an_alert_becomes_one_health_row_and_one_line(caplog):
    inner = MemoryWriter()
    writer = AlertingWriter(inner, S)
    with caplog.at_level(logging.WARNING, logger="loopscope.alerts"):
        for step in range(1, 8):
            for position in range(2):
                writer.append("router", visit(step, 0.7 if position else 0.9, position))
    (row,) = inner.rows("health")
    assert (row["event"], row["severity"], row["step"], row["run_id"]) == ("alert", "warn", 3, "r")
    assert "load_entropy: A few experts carry the load. head 1, since step 1" in row["detail"]
    assert len(caplog.records) == 1
    # Replayed, the alert's own row is no further finding.
    engine = AlertEngine(S)
    assert engine.observe_rows("health", [row]) == []


def test_the_last_trace_is_judged_at_the_close():
    inner = MemoryWriter()
    writer = AlertingWriter(inner, S)
    for step in range(1, 4):
        writer.append("router", visit(step, 0.7))
    assert inner.rows("health") == []
    writer.close()
    assert len(inner.rows("health")) == 1


def test_global_rows_speak_for_the_run_where_ranks_write_theirs_too():
    writer = AlertingWriter(MemoryWriter(), S)
    for step in range(1, 6):
        writer.append("router", visit(step, 0.95))
        writer.append("router", visit(step, 0.1, aggregation_scope="rank_local", rank=0))
    writer.close()
    assert writer.engine.alerts == []


def test_events_are_told_but_not_written_twice(caplog):
    inner = MemoryWriter()
    writer = AlertingWriter(inner, S)
    event = {"step": 1, "event": "nonfinite", "severity": "critical", "detail": "2 logits"}
    with caplog.at_level(logging.WARNING, logger="loopscope.alerts"):
        writer.append("health", event)
    assert inner.tables == {"health": [event]}
    assert "Values are not finite" in caplog.text


def test_a_failing_rule_never_costs_a_row():
    broken = visit(1, "not a number")
    inner = MemoryWriter()
    writer = AlertingWriter(inner, S)
    for step in (1, 2):
        writer.append("router", broken | {"step": step})
    writer.close()
    assert len(inner.rows("router")) == 2
    assert inner.closed
    assert writer.errors == 2
    strict = AlertingWriter(MemoryWriter(), S, on_error="raise")
    strict.append("router", broken)
    with pytest.raises(ValueError, match="not a number"):
        strict.append("router", broken | {"step": 2})
