"""Rows of real trainings on two ranks under FSDP2: complete, counted once, the same in every configuration."""

import pytest
import torch

import loopscope

pytestmark = pytest.mark.ranks

LOUD = {"trace_every": 3, "probe_every": 0, "on_error": "raise", "per_rank": True}
BF16 = {"steps": 4, "dtype": "bfloat16", "loopscope": LOUD}
COMPILED_MICROBATCHES = {
    "steps": 6,
    "dtype": "bfloat16",
    "recompute": "full",
    # Traces as inductor does and runs eagerly: the graphs are what is looked at here; scripts/bench runs inductor.
    "compile": "aot_eager",
    "global_batch_size": 16,
    "loopscope": LOUD,
}


@pytest.fixture(scope="module")
def finished(trainings):
    return trainings(
        [
            {"name": "bf16", **BF16},
            {"name": "bf16-full", **BF16, "recompute": "full"},
            {"name": "bf16-selective", **BF16, "recompute": "selective"},
            {"name": "fp32", "steps": 4, "loopscope": LOUD},
            {"name": "fp32-partial", "steps": 4, "backend": "partial_dtensor", "loopscope": LOUD},
            {"name": "compiled", **COMPILED_MICROBATCHES, "keep_windows": True},
            {
                "name": "compiled-unwatched",
                **COMPILED_MICROBATCHES,
                "loopscope": {"trace_every": 0, "probe_every": 0},
            },
        ],
        ranks=2,
    )


ALL = ["bf16", "bf16-full", "bf16-selective", "fp32", "fp32-partial", "compiled"]


@pytest.mark.parametrize("name", ALL)
def test_every_rank_has_one_row_per_visit_of_every_traced_step(finished, name):
    run = finished.run(name)
    steps = 6 if name == "compiled" else 4
    for rank in ("rank = 0", "rank = 1", "rank is null"):
        rows = run.sql(f"select step, unrolled_pos from router where {rank} order by 1, 2").fetchall()
        assert rows == [(step, pos) for step in range(1, steps + 1) for pos in range(8)]


@pytest.mark.parametrize("name", ALL)
def test_coverage_is_whole_and_nothing_was_lost(finished, name):
    events = finished.run(name).sql(
        "select event, severity, value from health where severity <> 'info' or (event = 'coverage' and value <> 1)"
    )
    assert events.fetchall() == []


@pytest.mark.parametrize("name", ALL)
def test_global_rows_are_the_sum_of_the_ranks(finished, name):
    run = finished.run(name)
    columns = (
        "step, unrolled_pos, expert_count, num_tokens, z_max, z_mean, token_entropy_mean, lb_loss_micro_mean"
    )
    by_rank = [
        run.sql(f"select {columns} from router where {r} order by 1, 2").fetchall()
        for r in ("rank=0", "rank=1")
    ]
    merged = run.sql(f"select {columns} from router where rank is null order by 1, 2").fetchall()
    assert len(merged) == len(by_rank[0])
    for whole, first, second in zip(merged, *by_rank, strict=True):
        assert whole[:2] == first[:2] == second[:2]
        assert whole[2] == [a + b for a, b in zip(first[2], second[2], strict=True)]
        assert sum(whole[2]) == 2 * whole[3] == 2 * (first[3] + second[3])
        assert whole[4] == max(first[4], second[4])
        for i in (5, 6, 7):
            assert whole[i] == pytest.approx((first[i] + second[i]) / 2, abs=1e-6)


@pytest.mark.parametrize("name", ["bf16-full", "bf16-selective"])
def test_recompute_counts_once(finished, name):
    """The same rows, and the same load, as without recompute; nothing is recorded in the backward."""
    query = "select step, unrolled_pos, rank, expert_count, lb_loss from router order by 1, 2, 3 nulls first"
    assert finished.run(name).sql(query).fetchall() == finished.run("bf16").sql(query).fetchall()
    assert finished[name][0]["objectives"] == finished["bf16"][0]["objectives"]


def test_partial_dtensor_gives_the_same_rows(finished):
    query = "select step, unrolled_pos, rank, expert_count, z_mean from router order by 1, 2, 3 nulls first"
    assert finished.run("fp32-partial").sql(query).fetchall() == finished.run("fp32").sql(query).fetchall()


def test_losses_are_global_close_and_equal_the_rows_of_the_visits(finished):
    for name in ALL:
        run = finished.run(name)
        losses = run.sql(
            "select step, lb_loss, closure_error, num_target_tokens, aggregation_scope from loss "
            "where rank is null order by step"
        ).fetchall()
        micro = dict(
            run.sql(
                "select step, avg(lb_loss_micro_mean) from router where rank is null group by step"
            ).fetchall()
        )
        assert [row[0] for row in losses] == list(range(1, len(losses) + 1))
        for step, lb_loss, closure, targets, scope in losses:
            assert scope == "global"
            assert abs(closure) < 1e-6
            assert targets == 2 * 2 * 32 * (4 if name == "compiled" else 1)
            assert lb_loss == pytest.approx(micro[step], abs=1e-5)


def test_compiled_blocks_get_no_further_graph_and_no_break(finished):
    for rank in range(2):
        watched, alone = finished["compiled"][rank], finished["compiled-unwatched"][rank]
        assert watched["graphs"] == alone["graphs"] > 0
        assert watched["graph_breaks"] == alone["graph_breaks"] == 0
        assert watched["objectives"] == alone["objectives"]


def test_four_microbatches_make_one_row_per_visit(finished):
    rows = finished.run("compiled").sql(
        "select distinct num_microbatches, num_tokens from router where rank is null"
    )
    assert rows.fetchall() == [(4, 4 * 2 * 2 * 32)]


def joined_rows(finished, name, step):
    """reduce_trace over the tensors of all ranks and microbatches of a step, as one batch in this process."""
    windows = [
        window["points"]
        for rank in range(finished.ranks)
        for window in torch.load(finished.root / f"{name}.json.{rank}.pt")
        if window["step"] == step
    ]
    sink = {}
    for pos, first in windows[0].items():
        parts = {
            key: torch.cat([window[pos][key] for window in windows])
            if isinstance(value, torch.Tensor)
            else value
            for key, value in first.items()
        }
        sink[pos] = loopscope.TracePoint(**parts)
    meta = loopscope.TraceMeta(num_stacks=3, num_layers_in_stack=2, num_experts=16, num_active=2)
    return loopscope.reduce_trace(sink, meta)


MERGED_OTHERWISE = {
    # Means or maxima over microbatch × rank values: what one batch would not show, which is their point.
    *("lb_loss_micro_mean", "maxvio_micro_mean", "maxvio_rank_max"),
    # The rank's own, and the run's keys.
    *("num_microbatches", "filled_microbatches", "null_reasons"),
}


def check_against_one_process(finished, name, steps):
    """Counts exactly; sums of float32 terms in another order to 1e-5; bf16 tensors are the same on both sides."""
    run = finished.run(name)
    keys = {
        "router": ["unrolled_pos"],
        "residual": ["unrolled_pos"],
        "transition": ["kind", "from_pos", "to_pos"],
    }
    compared = 0
    for step in steps:
        for table, expected in joined_rows(finished, name, step).items():
            rows = run.arrow(table).to_pylist()
            found = {
                tuple(r[k] for k in keys[table]): r for r in rows if r["step"] == step and r["rank"] is None
            }
            assert len(found) == len(expected) > 0
            for row in expected:
                other = found[tuple(row[k] for k in keys[table])]
                for column, value in row.items():
                    if column in MERGED_OTHERWISE:
                        continue
                    where = (step, table, column, row)
                    if isinstance(value, float) or (isinstance(value, list) and isinstance(value[0], float)):
                        assert other[column] == pytest.approx(value, rel=1e-5, abs=1e-6), where
                    else:
                        assert other[column] == value, where
                    compared += 1
    return compared


def test_global_rows_equal_one_process_over_the_joined_batch(finished):
    assert check_against_one_process(finished, "compiled", range(1, 7)) > 2000


@pytest.mark.long
def test_fifty_steps_compiled_by_inductor_equal_one_process_over_the_joined_batch(trainings):
    scenario = {
        **COMPILED_MICROBATCHES,
        "steps": 50,
        "compile": "inductor",
        "keep_windows": True,
        "name": "long",
    }
    finished = trainings(
        [{**scenario, "loopscope": {**LOUD, "trace_every": 7, "compile_reductions": True}}], ranks=2
    )
    steps = [
        row[0] for row in finished.run("long").sql("select distinct step from router order by 1").fetchall()
    ]
    assert steps == [*range(1, 11), 14, 16, 21, 28, 32, 35, 42, 49, 50]
    assert check_against_one_process(finished, "long", steps) > 5000
    [(detail,)] = finished.run("long").sql("select detail from health where event = 'warm_up'").fetchall()
    assert " 0 failed" in detail
