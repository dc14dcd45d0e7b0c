"""Two real ranks: different data, one set of global rows, and no hang when one of them sees nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rank_worker import STEPS, batch, model, traced
from test_global import assert_same_rows

from loopscope import open_run, reduce_trace

pytestmark = pytest.mark.ranks


def _run(out, kind):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    script = str(Path(__file__).with_name("rank_worker.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(out), kind],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            text, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0, text
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return open_run(out)


def _steps(run, table, order):
    rows = sorted(run.arrow(table).to_pylist(), key=lambda row: (row["step"], *(row[name] for name in order)))
    return {step: [row for row in rows if row["step"] == step] for step in range(1, STEPS + 1)}


@pytest.mark.parametrize("kind", ["clean", "empty", "error"])
def test_two_ranks(tmp_path, kind):
    run = _run(tmp_path / "run", kind)
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
