import json
import math
from dataclasses import replace

import pytest
import torch
from collect_helpers import meta, point, sink, specs, split

from loopscope import LoopTraceCollector, LossComponents, ParquetCollector, reduce_trace
from loopscope.collect import MemoryWriter, ProbeCorpus, RowContext, RowWriter
from loopscope.errors import ConfigError, MetricInputError, ProbeError, TraceError
from loopscope.trace import ACTIVE_TRACE_SINK

LOSS = LossComponents(
    task_loss=2.0, lb_loss=1.5, lb_loss_factor=0.01, z_loss=4.0, z_loss_factor=0.001, total_loss=2.019
)
CORPUS = ProbeCorpus(name="tiny", hash="abc", strata={"repetition": ("low", "high")})
RUN = ("run_id", "attempt", "rank", "world_size", "aggregation_scope", "step")
CLOCK = ("tokens_seen", "elapsed_s", "wall_time")


def collector(on_error="raise", *, visits=None, writer=None):
    writer = MemoryWriter() if writer is None else writer
    return writer, ParquetCollector(
        writer,
        context=RowContext(run_id="r", attempt=2, rank=1, world_size=4),
        expected_visits=specs() if visits is None else visits,
        on_error=on_error,
        corpus=CORPUS,
    )


def metrics(row):
    return {name: value for name, value in row.items() if name not in (*RUN, *CLOCK)}


def test_satisfies_the_protocols():
    writer, made = collector()
    assert isinstance(made, LoopTraceCollector)
    assert isinstance(writer, RowWriter)


def test_rows_are_those_of_reduce_trace_with_run_keys():
    writer, made = collector()
    made.begin_step(3, tokens_seen=640)
    made.on_trace_step(3, sink(), meta())
    expected = reduce_trace(sink(), meta())
    for table, rows in expected.items():
        assert [metrics(row) for row in writer.tables[table]] == rows
    row = writer.tables["router"][0]
    assert [row[name] for name in RUN] == ["r", 2, 1, 4, "rank_local", 3]
    assert row["tokens_seen"] == 640
    assert row["wall_time"].tzinfo is not None


def test_coverage_row_at_every_traced_step():
    writer, made = collector()
    for step in (1, 2):
        headline = made.on_trace_step(step, sink(), meta())
        assert headline["health/coverage"] == 1.0
    coverage = writer.rows("health", event="coverage")
    assert [(row["step"], row["count"], row["value"]) for row in coverage] == [(1, 8, 1.0), (2, 8, 1.0)]


def test_missing_visit_is_an_event_with_its_position_under_both_modes():
    for mode in ("raise", "record"):
        writer, made = collector(mode)
        window = sink()
        del window[4]
        headline = made.on_trace_step(1, window, meta())
        (row,) = writer.rows("health", event="coverage")
        assert json.loads(row["detail"]) == {"seen": 7, "expected": 8, "missing": [4]}
        assert headline["health/coverage"] == 7 / 8
        assert len(writer.tables["router"]) == 7


def test_visit_missing_in_one_microbatch_counts_as_missing():
    writer, made = collector()
    first, second = split(sink(), 2)
    del second[4]
    made.on_trace_step(1, first, meta(), microbatch=0, num_microbatches=2)
    made.on_trace_step(1, second, meta(), microbatch=1, num_microbatches=2)
    (row,) = writer.rows("health", event="coverage")
    assert json.loads(row["detail"])["missing"] == [4]
    counts = {r["unrolled_pos"]: r["num_microbatches"] for r in writer.tables["router"]}
    assert counts[4] == 1
    assert counts[3] == 2


def test_more_than_promised_is_an_error():
    extra = replace(specs()[-1], unrolled_pos=8)
    window = sink()
    window[8] = point(extra)
    writer, made = collector("raise")
    with pytest.raises(TraceError, match="visits that nobody promised"):
        made.on_trace_step(1, window, meta())
    writer, made = collector("record")
    made.on_trace_step(1, window, meta())
    (row,) = writer.rows("health", event="coverage")
    assert row["severity"] == "critical"
    assert json.loads(row["detail"])["unexpected"] == [8]


def test_smaller_depth_than_the_largest_is_complete():
    writer, made = collector(visits=specs(steps=5))
    made.on_trace_step(1, sink(specs(steps=2)), meta(steps=2))
    (row,) = writer.rows("health", event="coverage")
    assert row["value"] == 1.0
    assert {r["num_loop_steps"] for r in writer.tables["router"]} == {2}


def test_microbatches_equal_one_batch():
    whole_writer, whole = collector()
    window = sink(batch=4)
    whole.on_trace_step(1, window, meta())
    writer, made = collector()
    for number, part in enumerate(split(window, 4)):
        headline = made.on_trace_step(1, part, meta(), microbatch=number, num_microbatches=4)
        assert bool(headline) is (number == 3)
        assert ("router" in writer.tables) is (number == 3)
    per_microbatch = {"maxvio_micro_mean", "lb_loss_micro_mean", "filled_microbatches", "num_microbatches"}
    for table in ("router", "residual", "transition"):
        for one, many in zip(whole_writer.tables[table], writer.tables[table], strict=True):
            for name, value in metrics(one).items():
                if name in per_microbatch:
                    continue
                if isinstance(value, float):
                    assert many[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
                elif name in ("expert_mass", "mean_prob"):
                    assert many[name] == pytest.approx(value, rel=1e-6), name
                else:
                    assert many[name] == value, name
            assert many["num_microbatches"] == 4
    micro = [row["lb_loss_micro_mean"] for row in writer.tables["router"]]
    alone = [[row["lb_loss"] for row in reduce_trace(part, meta())["router"]] for part in split(window, 4)]
    assert micro == pytest.approx([sum(column) / 4 for column in zip(*alone, strict=True)], rel=1e-6)


def test_a_microbatch_without_a_valid_token_changes_nothing():
    window = sink(batch=4)
    first, second = split(window, 2)
    writer, made = collector()
    none = torch.zeros(2, 5, dtype=torch.bool)
    made.on_trace_step(1, first, meta(), microbatch=0, num_microbatches=2)
    made.on_trace_step(1, second, meta(), valid=none, microbatch=1, num_microbatches=2)
    alone = {row["unrolled_pos"]: row for row in reduce_trace(first, meta())["router"]}
    for row in writer.tables["router"]:
        for name in ("expert_count", "lb_loss", "z_mean", "margin_mean", "maxvio_count", "num_tokens"):
            assert row[name] == alone[row["unrolled_pos"]][name]


def test_all_padding_is_named():
    writer, made = collector()
    made.on_trace_step(1, sink(), meta(), valid=torch.zeros(2, 5, dtype=torch.bool))
    assert writer.rows("health", event="no_valid_token")


def test_nan_in_the_router_is_a_critical_event_and_no_crash():
    writer, made = collector("raise")
    window = sink()
    window[3].router_logits[0, 0, 0] = math.nan
    made.on_trace_step(1, window, meta())
    (row,) = writer.rows("health", event="nonfinite")
    assert (row["unrolled_pos"], row["severity"]) == (3, "critical")
    assert row["count"] == 1


def test_a_visit_that_fails_costs_its_own_row_only():
    window = sink()
    window[3] = point(specs()[3], idx=torch.zeros(2, 5, 3, dtype=torch.int64))  # k = 3, promised 2
    writer, made = collector("record")
    made.on_trace_step(1, window, meta())
    rows = {row["unrolled_pos"]: row for row in writer.tables["router"]}
    assert len(rows) == 8
    assert rows[3]["expert_count"] is None
    assert json.loads(rows[3]["null_reasons"])["expert_count"] == "failed"
    assert rows[2]["expert_count"] is not None
    failed = writer.rows("health", event="visit_failed")
    assert failed[0]["unrolled_pos"] == 3
    assert "MetricInputError: topk_idx has shape (2, 5, 3), expected (2, 5, 2)" in failed[0]["detail"]
    assert made.errors == len(failed)
    writer, made = collector("raise")
    with pytest.raises(MetricInputError, match="topk_idx has shape"):
        made.on_trace_step(1, window, meta())


def test_broken_values_give_null_rows_not_plausible_ones():
    window = sink()
    window[2].topk_idx[0, 0, 0] = 99
    writer, made = collector("record")
    made.on_trace_step(1, window, meta())
    row = writer.rows("router", unrolled_pos=2)[0]
    assert row["load_cv"] is None
    assert json.loads(row["null_reasons"])["load_cv"] == "failed"
    assert writer.rows("health", event="index_out_of_range")[0]["count"] == 1
    assert writer.rows("residual", unrolled_pos=2)[0]["norm_mean"] is not None


def test_weights_that_do_not_sum_to_one_are_named():
    window = sink()
    window[5].topk_weights.mul_(2.5)
    writer, made = collector("raise")
    made.on_trace_step(1, window, meta())
    (row,) = writer.rows("health", event="weights_not_normalised")
    assert (row["unrolled_pos"], row["count"], row["severity"]) == (5, 10, "warn")


def test_recorded_twice_keeps_the_first_and_says_so():
    first, second = point(specs()[0], seed=1), point(specs()[0], seed=2)

    def window():
        opened = ACTIVE_TRACE_SINK.arm()
        for spec in specs():
            ACTIVE_TRACE_SINK.record(first if spec.unrolled_pos == 0 else point(spec))
        ACTIVE_TRACE_SINK.record(second)
        ACTIVE_TRACE_SINK.disarm()
        return opened

    writer, made = collector("record")
    made.on_trace_step(1, window(), meta())
    (row,) = writer.rows("health", event="sink_fault")
    assert "unrolled_pos 0 recorded by" in row["detail"]
    counts = torch.bincount(first.topk_idx.reshape(-1), minlength=8).tolist()
    assert writer.rows("router", unrolled_pos=0)[0]["expert_count"] == counts
    _, made = collector("raise")
    with pytest.raises(TraceError, match="the window is invalid"):
        made.on_trace_step(1, window(), meta())


def test_wrong_provenance():
    wrong = replace(meta(), loop_axis_provenance="reshaped")
    _, made = collector("raise")
    with pytest.raises(TraceError, match="reshaped"):
        made.on_trace_step(1, sink(), wrong)
    writer, made = collector("record")
    assert made.on_trace_step(1, sink(), wrong) == {}
    (row,) = writer.rows("health", event="error")
    assert row["detail"].startswith("on_trace_step: TraceError: TraceMeta.loop_axis_provenance")
    assert made.errors == made.dropped == 1


def test_a_failed_microbatch_skips_the_step_once_and_the_next_step_is_whole():
    writer, made = collector("record")
    wrong = replace(meta(), loop_axis_provenance="reshaped")
    parts = split(sink(), 2)
    made.on_trace_step(1, parts[0], wrong, microbatch=0, num_microbatches=2)
    made.on_trace_step(1, parts[1], meta(), microbatch=1, num_microbatches=2)
    assert made.errors == 1
    assert "router" not in writer.tables
    made.on_trace_step(2, sink(), meta())
    assert len(writer.tables["router"]) == 8


def test_microbatches_out_of_order_and_a_model_that_changes():
    _, made = collector("raise")
    parts = split(sink(), 2)
    made.on_trace_step(1, parts[0], meta(), microbatch=0, num_microbatches=2)
    with pytest.raises(TraceError, match="got microbatch 2 of 3, expected 1 of 2"):
        made.on_trace_step(1, parts[1], meta(), microbatch=2, num_microbatches=3)
    _, made = collector("raise")
    made.on_trace_step(1, parts[0], meta(), microbatch=0, num_microbatches=2)
    with pytest.raises(TraceError, match="TraceMeta changed"):
        made.on_trace_step(1, parts[1], meta(layers=3), microbatch=1, num_microbatches=2)


def test_microbatches_that_never_came_are_named():
    writer, made = collector("record")
    made.on_trace_step(1, split(sink(), 2)[0], meta(), microbatch=0, num_microbatches=2)
    made.on_trace_step(2, sink(), meta())
    (row,) = writer.rows("health", event="trace_incomplete")
    assert (row["step"], row["severity"]) == (1, "critical")
    assert {r["step"] for r in writer.tables["router"]} == {2}


def test_loss_row_and_closure():
    writer, made = collector()
    headline = made.on_metrics_step(1, LOSS, grad_norm=0.5, lr=1e-3, task_loss_sum=20.0, num_target_tokens=10)
    (row,) = writer.tables["loss"]
    assert row["closure_error"] == pytest.approx(0.0, abs=1e-12)
    assert (row["grad_norm"], row["lr"], row["num_target_tokens"]) == (0.5, 1e-3, 10)
    assert headline["loss/total"] == 2.019
    assert "health" not in writer.tables
    made.on_metrics_step(2, replace(LOSS, total_loss=2.034))  # case aux-added-twice
    (event,) = writer.rows("health", event="closure")
    assert event["value"] == pytest.approx(0.015, abs=1e-6)
    assert (event["step"], event["severity"]) == (2, "critical")
    assert writer.tables["loss"][1]["grad_norm"] is None


def test_losses_come_late_but_in_order():
    writer, made = collector("raise")
    for step in (1, 2, 3):
        made.begin_step(step, tokens_seen=step * 100)
    made.on_metrics_step(1, LOSS)
    made.on_metrics_step(2, LOSS)
    assert [row["tokens_seen"] for row in writer.tables["loss"]] == [100, 200]
    with pytest.raises(TraceError, match="got step 2 after step 2"):
        made.on_metrics_step(2, LOSS)


def test_nonfinite_loss():
    writer, made = collector()
    made.on_metrics_step(1, replace(LOSS, task_loss=math.nan, total_loss=math.nan))
    row = writer.tables["loss"][0]
    assert row["task_loss"] is None
    assert row["nonfinite_fields"] == "task_loss,total_loss"
    assert json.loads(row["null_reasons"])["closure_error"] == "nonfinite"
    (event,) = writer.rows("health", event="nonfinite_loss")
    assert event["count"] == 2


def test_probe_rows():
    writer, made = collector()
    losses = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 0.0]])
    headline = made.on_probe_step(0, sink(), meta(), losses)
    assert headline["probe/loss"] == 1.5
    assert 0 <= headline["probe/overlap_mean"] <= 1
    assert [row["unrolled_pos"] for row in writer.tables["probe_router"]] == list(range(8))
    assert {row["corpus_hash"] for row in writer.tables["probe_router"]} == {"abc"}
    means = {(r["stratum_kind"], r["stratum"]): r["loss_mean"] for r in writer.tables["probe_loss"]}
    assert means == {("all", "all"): 1.5, ("repetition", "low"): 1.0, ("repetition", "high"): 2.0}
    assert "router" not in writer.tables
    assert writer.rows("health", event="probe_coverage")[0]["value"] == 1.0


def test_overlap_headline_is_over_every_pair_of_loop_steps():
    _, made = collector()
    window = sink()
    overlaps = []
    for layer in (0, 1):
        for first in range(3):
            for second in range(first + 1, 3):
                a = window[1 + first * 2 + layer].topk_idx.reshape(10, -1, 1)
                b = window[1 + second * 2 + layer].topk_idx.reshape(10, 1, -1)
                overlaps.append(float((a == b).any(1).double().sum(1).mean() / 2))
    headline = made.on_probe_step(0, window, meta(), torch.zeros(2, 5))
    assert headline["probe/overlap_mean"] == pytest.approx(sum(overlaps) / 6)


def test_probe_without_a_corpus():
    _, made = collector()
    made.corpus = None
    with pytest.raises(ProbeError, match="knows no corpus"):
        made.on_probe_step(0, sink(), meta(), torch.zeros(2, 5))


class _BrokenWriter(MemoryWriter):
    def append(self, table, row):
        raise OSError("no space left on device")


def test_a_writer_that_raises():
    for call in (
        lambda made: made.on_metrics_step(1, LOSS),
        lambda made: made.on_trace_step(1, sink(), meta()),
        lambda made: made.on_probe_step(1, sink(), meta(), torch.zeros(2, 5)),
    ):
        _, made = collector("record", writer=_BrokenWriter())
        assert call(made) == {}
        assert made.errors == 2  # the row, and the health row about it
        _, made = collector("raise", writer=_BrokenWriter())
        with pytest.raises(OSError, match="no space left"):
            call(made)


def test_close_names_what_was_left_open_and_closes_the_writer():
    writer, made = collector("record")
    made.on_trace_step(1, split(sink(), 2)[0], meta(), microbatch=0, num_microbatches=2)
    made.close()
    assert writer.closed
    assert writer.rows("health", event="trace_incomplete")


def test_unknown_mode():
    with pytest.raises(ConfigError, match="on_error is 'quiet'"):
        collector("quiet")


def test_health_bytes_and_time():
    writer, made = collector()
    window = sink()
    made.on_trace_step(1, window, meta())
    size = sum(t.numel() * t.element_size() for p in window.values() for t in p.tensors().values())
    assert writer.rows("health", event="trace_bytes")[0]["value"] == size
    timing = writer.rows("health", event="timing")[0]
    assert timing["value"] >= 0
    assert set(json.loads(timing["detail"])) == {"reduce", "finish", "write"}
