"""Rows of real trainings on two ranks under FSDP2: complete, counted once, the same in every configuration."""

import pytest

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
            {"name": "compiled", **COMPILED_MICROBATCHES},
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
