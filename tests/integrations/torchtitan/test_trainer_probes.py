"""The deep probe in a training on two sharded ranks: every table has rows, and training keeps its bits."""

import pytest

pytestmark = pytest.mark.ranks

QUIET = {"trace_every": 0, "probe_every": 0, "on_error": "raise"}
DEEP = {
    **QUIET,
    "probe_every": 1,
    "probe_deep_every": 2,
    "probe_shuffle_scope": "document",
    "probe_batch_size": 5,
}
COMPARED = ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng")


@pytest.fixture(scope="module")
def finished(trainings):
    base = {"steps": 3, "model": {"dropout": 0.1}, "recompute": "full"}
    return trainings(
        [{**base, "name": "plain", "loopscope": QUIET}, {**base, "name": "deep", "loopscope": DEEP}], 2
    )


def test_the_run_ends_bit_for_bit_as_without(finished):
    for rank in range(2):
        plain, probed = finished["plain"][rank], finished["deep"][rank]
        assert {key: probed[key] for key in COMPARED} == {key: plain[key] for key in COMPARED}


def test_every_table_has_rows_at_its_steps(finished):
    run = finished.run("deep")

    def steps(table):
        return [step for (step,) in run.sql(f"select distinct step from {table} order by step").fetchall()]

    assert steps("probe_loss") == steps("probe_overlap") == [0, 1, 2, 3]
    for table in ("probe_readout", "probe_margin", "probe_perturbation", "probe_specialisation"):
        assert steps(table) == [0, 2, 3]
    assert steps("probe_saturation") == [2, 3]
    assert run.problems == []
    found = run.sql("select count(*) from probe_perturbation where relative_distance is null").fetchall()
    assert found == [(0,)]


def test_the_last_readout_is_the_probes_own_loss(finished):
    rows = (
        finished.run("deep")
        .sql(
            "select r.loss_mean, l.loss_mean from probe_readout r join probe_loss l using (step) where "
            "l.stratum_kind = 'all' and r.loop_step = r.num_loop_steps - 1"
        )
        .fetchall()
    )
    assert len(rows) == 3
    assert all(one == pytest.approx(other, rel=1e-5) for one, other in rows)


def test_what_probes_cost_is_said(finished):
    shares = finished.run("deep").sql("select value from health where event = 'probe_cost'").fetchall()
    assert len(shares) == 4
    assert all(0 < share < 1 for (share,) in shares)


def test_every_rank_takes_part_and_one_writes(finished):
    """A sharded forward waits for all ranks, so both took part; and no row is there twice."""
    run = finished.run("deep")
    for table, key in (
        ("probe_loss", "step, stratum_kind, stratum"),
        ("probe_router", "step, unrolled_pos"),
        ("probe_readout", "step, readout, loop_step"),
        ("probe_perturbation", "step, unrolled_pos"),
    ):
        found = run.sql(
            f"select count(*), count(distinct ({key})), count(distinct rank) from {table}"
        ).fetchall()
        assert found[0][0] == found[0][1] > 0
        assert found[0][2] <= 1
