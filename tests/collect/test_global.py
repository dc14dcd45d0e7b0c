import json
import math
from dataclasses import replace

import pytest
import torch
from collect_helpers import meta, point, sink, specs, split
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_helpers import ranks

from loopscope import ParquetCollector, reduce_trace
from loopscope.collect import MemoryWriter, RowContext
from loopscope.collect.exchange_layout import ExchangeLayout
from loopscope.errors import ConfigError, MetricInputError, TraceError

PER_RANK = {
    "maxvio_micro_mean",
    "maxvio_rank_max",
    "lb_loss_micro_mean",
    "filled_microbatches",
    "num_microbatches",
}
LISTS = ("expert_mass", "mean_prob")


def trace(made, windows, *, step=1, metas=None, valids=None):
    """One microbatch on every rank; the writer last."""
    headline = {}
    for rank in reversed(range(len(made))):
        headline = made[rank].on_trace_step(
            step,
            windows[rank],
            meta() if metas is None else metas[rank],
            valid=None if valids is None else valids[rank],
        )
        assert bool(headline) is (rank == 0)
    return headline


def assert_same_rows(rows, expected):
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        for name, value in other.items():
            if name in PER_RANK:
                continue
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
            elif name in LISTS:
                assert row[name] == pytest.approx(value, rel=1e-6), name
            else:
                assert row[name] == value, name


def test_global_rows_equal_one_process_over_the_joined_batch():
    whole = sink(batch=6)
    expected = reduce_trace(whole, meta())
    writer, made, reducers = ranks(3)
    headline = trace(made, split(whole, 3))
    for table, rows in expected.items():
        assert_same_rows(writer.tables[table], rows)
    row = writer.tables["router"][0]
    assert (row["rank"], row["world_size"], row["aggregation_scope"]) == (None, 3, "global")
    assert headline["health/coverage"] == 1.0
    assert all([name for name, _ in reducer.calls] == ["sum", "max"] for reducer in reducers)


def test_what_belongs_to_a_rank_merges_over_ranks():
    parts = split(sink(batch=4), 2)
    alone = [reduce_trace(part, meta())["router"] for part in parts]
    writer, made, _ = ranks(2)
    trace(made, parts)
    for row, first, second in zip(writer.tables["router"], *alone, strict=True):
        assert row["maxvio_rank_max"] == pytest.approx(max(first["maxvio_count"], second["maxvio_count"]))
        assert row["lb_loss_micro_mean"] == pytest.approx((first["lb_loss"] + second["lb_loss"]) / 2)


def test_microbatches_and_ranks_together():
    whole = sink(batch=8)
    per_rank = [split(part, 2) for part in split(whole, 2)]
    writer, made, reducers = ranks(2)
    for rank in (1, 0):
        for number in (0, 1):
            window = per_rank[rank][number]
            made[rank].on_trace_step(1, window, meta(), microbatch=number, num_microbatches=2)
    for table, rows in reduce_trace(whole, meta()).items():
        assert_same_rows(writer.tables[table], rows)
    assert {row["num_microbatches"] for row in writer.tables["router"]} == {2}
    assert [name for name, _ in reducers[0].calls] == ["sum", "max"]


def _nothing(window):
    return {}


def _missing(window):
    del window[4]
    return window


def _broken_visit(window):
    window[3] = point(specs()[3], idx=torch.zeros(2, 5, 3, dtype=torch.int64))
    return window


def _other_experts(window):
    for position in (1, 3, 5):
        window[position] = point(replace(specs()[position], num_experts=6))
    return window


def _nan(window):
    window[3].router_logits[0, 0, 0] = math.nan
    return window


def _wrong_key(window):
    window[99] = window.pop(2)
    return window


@pytest.mark.parametrize("harm", [_nothing, _missing, _broken_visit, _other_experts, _nan, _wrong_key])
@pytest.mark.parametrize("victim", [0, 1])
def test_every_rank_takes_part_in_the_same_two_reductions(harm, victim):
    """Whatever one rank saw: buffers of the same sizes, the writer's rows, and the next step is whole again."""
    writer, made, reducers = ranks(2)
    windows = [sink(seed=1), sink(seed=2)]
    windows[victim] = harm(windows[victim])
    trace(made, windows)
    assert reducers[0].calls == reducers[1].calls
    assert len(reducers[0].calls) == 2
    assert len(writer.tables["router"]) == 8
    trace(made, [sink(seed=3), sink(seed=4)], step=2)
    assert reducers[0].calls == reducers[1].calls == reducers[0].calls[:2] * 2
    second = [row for row in writer.tables["router"] if row["step"] == 2]
    assert len(second) == 8
    assert all(row["num_tokens"] == 20 and row["lb_loss"] is not None for row in second)


def test_a_rank_that_saw_nothing():
    writer, made, _ = ranks(2)
    trace(made, [sink(), {}])
    assert_same_rows(writer.tables["router"], reduce_trace(sink(), meta())["router"])
    (row,) = writer.rows("health", event="coverage")
    assert json.loads(row["detail"])["missing"] == list(range(8))


def test_a_rank_without_a_valid_token():
    writer, made, _ = ranks(2)
    none = torch.zeros(2, 5, dtype=torch.bool)
    trace(made, [sink(seed=1), sink(seed=2)], valids=[None, none])
    expected = reduce_trace(sink(seed=1), meta())
    for row, other in zip(writer.tables["router"], expected["router"], strict=True):
        for name in ("expert_count", "num_tokens", "z_mean", "z_min", "margin_min", "maxvio_count"):
            assert row[name] == other[name], name


def test_a_failed_reduction_on_another_rank_is_a_null_row_and_an_event():
    writer, made, _ = ranks(2)
    trace(made, [sink(), _broken_visit(sink())])
    row = writer.rows("router", unrolled_pos=3)[0]
    assert row["expert_count"] is None
    assert json.loads(row["null_reasons"])["expert_count"] == "failed"
    assert writer.rows("router", unrolled_pos=2)[0]["expert_count"] is not None
    assert writer.rows("health", event="visit_failed", unrolled_pos=3)


@pytest.mark.parametrize(("victim", "says"), [(0, "topk_idx has shape"), (1, "failed on at least one rank")])
def test_a_failed_visit_was_seen_and_is_told_once_in_the_ranks_own_words_where_it_writes(victim, says):
    writer, made, _ = ranks(2)
    windows = [sink(seed=1), sink(seed=2)]
    windows[victim] = _broken_visit(windows[victim])
    headline = trace(made, windows)
    (row,) = [row for row in writer.rows("health", event="visit_failed") if "pair" not in row["detail"]]
    assert row["unrolled_pos"] == 3
    assert row["detail"].startswith("loop step 1, layer 0 (unrolled_pos 3): ")
    assert says in row["detail"]
    assert headline["health/coverage"] == 1.0
    assert made[0].errors == len(writer.rows("health", event="visit_failed"))


def test_positions_recorded_twice_are_told_by_text_here_and_by_number_elsewhere():
    def twice(seed):
        window = sink(seed=seed)
        window.faults.append("unrolled_pos 0 recorded by ...")
        return window

    writer, made, _ = ranks(3)
    trace(made, [twice(1), twice(2), twice(3)])
    own, others = writer.rows("health", event="sink_fault")
    assert (own["count"], own["detail"]) == (1, "unrolled_pos 0 recorded by ...")
    assert others["count"] == 2


def test_one_rank_with_a_reducer_gives_the_rows_of_one_without():
    writer, (made,), reducers = ranks(1)
    made.on_trace_step(1, sink(), meta())
    alone = MemoryWriter()
    ParquetCollector(alone, context=RowContext(run_id="r"), expected_visits=specs()).on_trace_step(
        1, sink(), meta()
    )
    own = ("aggregation_scope", "rank", "elapsed_s", "wall_time")
    for table in ("router", "residual", "transition"):
        rows, expected = (
            [{name: value for name, value in row.items() if name not in own} for row in found.tables[table]]
            for found in (writer, alone)
        )
        assert rows == expected
    assert [name for name, _ in reducers[0].calls] == ["sum", "max"]


def test_a_rank_whose_whole_step_failed(caplog):
    writer, made, _ = ranks(2)
    wrong = replace(meta(), loop_axis_provenance="reshaped")
    trace(made, [sink(), sink()], metas=[meta(), wrong])
    (row,) = writer.rows("health", event="rank_failed")
    assert row["count"] == 1
    assert "rank 1, step 1: on_trace_step: TraceError" in caplog.text
    assert_same_rows(writer.tables["router"], reduce_trace(sink(), meta())["router"])


def test_every_rank_failed():
    writer, made, _ = ranks(2)
    wrong = replace(meta(), loop_axis_provenance="reshaped")
    trace(made, [sink(), sink()], metas=[wrong, wrong])
    assert "router" not in writer.tables
    assert writer.rows("health", event="rank_failed")[0]["count"] == 2
    assert writer.rows("health", event="coverage")[0]["value"] == 0.0


def test_an_early_microbatch_that_fails_still_takes_part_at_the_last():
    writer, made, reducers = ranks(2)
    wrong = replace(meta(), loop_axis_provenance="reshaped")
    for rank in (1, 0):
        for number in (0, 1):
            first_of_one = (rank, number) == (1, 0)
            made[rank].on_trace_step(
                1, sink(), wrong if first_of_one else meta(), microbatch=number, num_microbatches=2
            )
    assert reducers[0].calls == reducers[1].calls
    assert writer.rows("health", event="rank_failed")


def test_non_finite_values_of_one_rank_do_not_spread():
    writer, made, _ = ranks(2)
    trace(made, [sink(seed=1), _nan(sink(seed=2))])
    row = writer.rows("router", unrolled_pos=3)[0]
    assert (row["z_mean"], row["nonfinite_count"]) == (None, 1)
    assert writer.rows("router", unrolled_pos=2)[0]["z_mean"] is not None
    assert writer.rows("health", event="nonfinite")[0]["unrolled_pos"] == 3


def test_ranks_of_different_depth_do_not_merge():
    visits = specs(steps=3)
    writer, made, _ = ranks(2, visits=visits)
    trace(made, [sink(), sink(specs(steps=2))], metas=[meta(), meta(steps=2)])
    assert "router" not in writer.tables
    assert writer.rows("health", event="depth_differs")


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_smaller_depth_uses_the_same_buffers(steps):
    visits = specs(steps=5)
    whole = sink(specs(steps=steps), batch=4)
    writer, made, reducers = ranks(2, visits=visits)
    trace(made, split(whole, 2), metas=[meta(steps=steps)] * 2)
    for table, rows in reduce_trace(whole, meta(steps=steps)).items():
        assert_same_rows(writer.tables[table], rows)
    assert writer.rows("health", event="coverage")[0]["value"] == 1.0
    layout = ExchangeLayout.of_expected(visits)
    assert [size for _, size in reducers[0].calls] == [layout.n_sum, layout.n_max]


def test_visits_that_nobody_promised():
    window = sink()
    window[8] = point(replace(specs()[-1], unrolled_pos=8))
    writer, made, _ = ranks(2)
    trace(made, [sink(), window])
    assert writer.rows("health", event="unexpected_visits")[0]["count"] == 1
    assert len(writer.tables["router"]) == 8


def test_under_raise_the_writer_raises_what_any_rank_saw():
    for harm, expected in ((_broken_visit, MetricInputError), (_wrong_key, MetricInputError)):
        _, made, reducers = ranks(2, on_error="raise")
        with pytest.raises(expected):
            made[1].on_trace_step(1, harm(sink()), meta())
        with pytest.raises((MetricInputError, TraceError)):
            made[0].on_trace_step(1, sink(), meta())
        assert reducers[0].calls == reducers[1].calls


def test_probe_counts_once():
    writer, made, reducers = ranks(2)
    for rank in (1, 0):
        made[rank].on_probe_step(0, sink(), meta(), torch.ones(2, 5))
    assert len(writer.tables["probe_router"]) == 8
    assert writer.tables["probe_loss"][0]["loss_mean"] == 1.0
    assert not reducers[0].calls


def test_without_expected_visits_there_is_no_layout():
    _, _, reducers = ranks(1)
    with pytest.raises(ConfigError, match="expected_visits is empty"):
        ParquetCollector(
            MemoryWriter(), context=RowContext(run_id="r"), expected_visits=(), reducer=reducers[0]
        )


def test_rank_local_rows_beside_the_global_ones():
    parts = split(sink(batch=4), 2)
    writer, made, reducers = ranks(2, per_rank=True)
    trace(made, parts)
    assert len(writer.rows("router", aggregation_scope="global")) == 8
    for rank, part in enumerate(parts):
        expected = reduce_trace(part, meta())
        own = writer.rows("router", aggregation_scope="rank_local", rank=rank)
        for row, other in zip(own, expected["router"], strict=True):
            assert row["expert_count"] == other["expert_count"]
            assert row["lb_loss"] == other["lb_loss"]
            assert row["mean_prob"] is row["margin_hist"] is None
            assert "counts only" in json.loads(row["null_reasons"])["mean_prob"]
            assert row["z_mean"] == other["z_mean"]
        assert len(writer.rows("transition", aggregation_scope="rank_local", rank=rank)) == 17
    assert reducers[0].calls == reducers[1].calls
    assert len(reducers[0].calls) == 2


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    padding=st.booleans(),
)
def test_any_split_over_ranks(cuts, seed, padding):
    total = sum(cuts)
    visits = specs(layers=1, steps=2)
    whole = sink(visits, batch=total, seq=3, seed=seed)
    valid = torch.rand(total, 3, generator=torch.Generator().manual_seed(seed)) < 0.7 if padding else None
    start, windows, valids = 0, [], []
    for cut in cuts:
        rows = slice(start, start + cut)
        windows.append({position: _cut(seen, rows) for position, seen in whole.items()})
        valids.append(None if valid is None else valid[rows])
        start += cut
    writer, made, _ = ranks(len(cuts), visits=visits)
    depth = meta(steps=2, layers=1)
    trace(made, windows, metas=[depth] * len(cuts), valids=valids)
    for table, rows in reduce_trace(whole, depth, valid=valid).items():
        assert_same_rows(writer.tables[table], rows)


def _cut(seen, rows):
    fields = {name: getattr(seen, name) for name in seen.__dataclass_fields__}
    return type(seen)(**{**fields, **{name: tensor[rows] for name, tensor in seen.tensors().items()}})
