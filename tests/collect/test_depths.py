"""Microbatches of one step that ran different depths: one row per visit, each with the tokens that reached it."""

from dataclasses import replace

import pytest
from collect_helpers import meta, sink, specs
from rank_helpers import ranks

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, RowContext
from loopscope.collect.accumulate import StepAccumulator
from loopscope.collect.depths import merge_depths
from loopscope.collect.rows import step_rows


def collector():
    writer = MemoryWriter()
    context = RowContext(run_id="run", attempt=1)
    return writer, ParquetCollector(writer, context=context, expected_visits=specs())


def rows(*depths: int):
    """Rows of a step with a microbatch of each depth, and of each microbatch on its own."""
    together, alone = StepAccumulator(), []
    for seed, steps in enumerate(depths):
        own = StepAccumulator()
        for accumulator in (together, own):
            accumulator.add(sink(specs(steps=steps), seed=seed), mixed=True)
        alone.append(step_rows(own.finish()).tables)
    return step_rows(together.finish()).tables, alone


@pytest.mark.parametrize("depths", [(3, 1), (1, 3), (2, 3, 1), (1, 1, 2)])
def test_counts_are_those_of_the_microbatches_that_reached_the_visit(depths):
    found, alone = rows(*depths)
    assert [row["unrolled_pos"] for row in found["router"]] == [
        v.unrolled_pos for v in specs(steps=max(depths))
    ]
    for row in found["router"]:
        same = [
            other
            for tables in alone
            for other in tables["router"]
            if (other["block"], other["loop_step"], other["layer_idx"])
            == (row["block"], row["loop_step"], row["layer_idx"])
        ]
        assert row["num_microbatches"] == len(same)
        assert row["expert_count"] == [
            sum(counts) for counts in zip(*(o["expert_count"] for o in same), strict=True)
        ]
        assert row["num_tokens"] == sum(other["num_tokens"] for other in same)


def test_each_depth_has_its_own_way_out():
    found, alone = rows(3, 1)
    exits = {row["from_loop_step"]: row for row in found["transition"] if row["kind"] == "exit"}
    assert sorted(exits) == [0, 2]
    for step, tables in ((2, alone[0]), (0, alone[1])):
        (own,) = [row for row in tables["transition"] if row["kind"] == "exit"]
        assert exits[step]["relative_delta"] == own["relative_delta"]
    assert {row["to_pos"] for row in exits.values()} == {specs(steps=3)[-1].unrolled_pos}


def test_coverage_asks_each_microbatch_for_the_passes_that_it_ran():
    writer, made = collector()
    made.on_trace_step(1, sink(specs(steps=1)), meta(steps=1), microbatch=0, num_microbatches=2)
    made.on_trace_step(1, sink(specs(steps=3)), meta(steps=3), microbatch=1, num_microbatches=2)
    (row,) = writer.rows("health", event="coverage")
    assert (row["severity"], row["value"], row["count"]) == ("info", 1.0, len(specs(steps=3)))
    assert {row["num_loop_steps"] for row in writer.tables["router"]} == {3}


def test_a_visit_that_a_deep_microbatch_lost_is_missing():
    writer, made = collector()
    lost = {pos: point for pos, point in sink(specs(steps=3)).items() if pos != 5}
    made.on_trace_step(1, sink(specs(steps=3)), meta(steps=3), microbatch=0, num_microbatches=3)
    made.on_trace_step(1, lost, meta(steps=3), microbatch=1, num_microbatches=3)
    made.on_trace_step(1, sink(specs(steps=1)), meta(steps=1), microbatch=2, num_microbatches=3)
    (row,) = writer.rows("health", event="coverage")
    assert (row["severity"], row["count"], row["detail"]) == (
        "warn",
        7,
        '{"seen": 7, "expected": 8, "missing": [5]}',
    )


def test_positions_that_contradict_each_other_are_numbered_anew():
    whole = specs(head=1, layers=2, steps=1, tail=1)
    without = (whole[0], replace(whole[2], unrolled_pos=1), replace(whole[3], unrolled_pos=2))
    accumulator = StepAccumulator()
    for visits in (whole, without):
        accumulator.add(sink(visits), mixed=True)
    found = step_rows(accumulator.finish()).tables["router"]
    assert [(row["unrolled_pos"], row["block"], row["layer_idx"], row["num_microbatches"]) for row in found] == [
        (0, "head", None, 2), (1, "loop", 0, 1), (2, "loop", 1, 2), (3, "tail", None, 2)
    ]  # fmt: skip


def test_one_depth_is_left_as_it_is():
    accumulator = StepAccumulator()
    accumulator.add(sink(specs(steps=2)), mixed=True)
    own = accumulator.partials
    assert list(merge_depths({specs(steps=2): own})) == list(own)


def test_ranks_that_merge_their_rows_need_one_depth():
    writer, made, _ = ranks(2)
    for each in reversed(made):
        each.on_trace_step(1, sink(specs(steps=1)), meta(steps=1), microbatch=0, num_microbatches=2)
        each.on_trace_step(1, sink(specs(steps=3)), meta(steps=3), microbatch=1, num_microbatches=2)
    assert "router" not in writer.tables
    (row,) = writer.rows("health", event="rank_failed")
    assert (row["severity"], row["count"]) == ("critical", 2)
