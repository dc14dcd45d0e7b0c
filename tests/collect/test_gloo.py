"""Two real ranks: different data, one set of global rows, and no hang when one of them sees nothing."""

from pathlib import Path

import pytest
from rank_worker import STEPS, batch, model, traced
from test_global import assert_same_rows

from loopscope import open_run, reduce_trace

pytestmark = pytest.mark.ranks


WORKER = Path(__file__).with_name("rank_worker.py")


def _steps(run, table, order):
    rows = sorted(run.arrow(table).to_pylist(), key=lambda row: (row["step"], *(row[name] for name in order)))
    return {step: [row for row in rows if row["step"] == step] for step in range(1, STEPS + 1)}


@pytest.mark.parametrize("kind", ["clean", "empty", "error"])
def test_two_ranks(tmp_path, kind, rank_processes):
    statuses, output = rank_processes.run(WORKER, str(tmp_path / "run"), kind, ranks=2)
    assert statuses == [0, 0], output
    run = open_run(tmp_path / "run")
    net = model()
    router = _steps(run, "router", ("unrolled_pos",))
    for step in range(1, STEPS + 1):
        harmed = kind != "clean" and step == 2
        ids = batch(step).chunk(2)[0] if harmed else batch(step)
        expected = reduce_trace(traced(net, ids)[0], net.trace_meta())
        assert_same_rows(router[step], expected["router"])
        assert {row["aggregation_scope"] for row in router[step]} == {"global"}
        assert {row["rank"] for row in router[step]} == {None}
    losses = run.arrow("loss").to_pylist()
    assert [row["step"] for row in losses] == [1, 2, 3]
    assert all(abs(row["closure_error"]) < 1e-6 for row in losses)
    assert {row["num_target_tokens"] for row in losses} == {24}
    events = {row["event"] for row in run.arrow("health").to_pylist()}
    assert ("rank_failed" in events) is (kind == "error")
