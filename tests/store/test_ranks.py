"""Many processes write one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_runs import QUIET

from loopscope.analysis import open_run
from loopscope.store import RunStore
from loopscope.store.read.verify import verify_run

_RANK = """
import sys
from loopscope.store import RunStore, StoreOptions
root, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = StoreOptions(on_error="raise", rotate_bytes=4000, tick_s=0.02, seal_in="thread")
store = RunStore.open(root, options=options)
writer = store.writer(attempt=1, writer=f"r{rank}")
print("ready", flush=True)
sys.stdin.readline()
for step in range(1, 41):
    for position in range(3):
        writer.append("router", {"step": step, "rank": rank, "world_size": ranks, "unrolled_pos": position,
            "aggregation_scope": "rank_local", "expert_count": [step, rank]})
store.close()
"""


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_rank_writes_its_own_files(tmp_path: Path, ranks: int) -> None:
    root = tmp_path / "run"
    with RunStore.create(root, options=QUIET) as store:
        store.claim_attempt(first_step=1, world_size=ranks)
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(root), str(rank), str(ranks)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.communicate("go\n", timeout=120)
            assert process.returncode == 0
    run = open_run(root)
    counts = run.sql(
        "select rank, count(*), sum(expert_count[2]) from router group by 1 order by 1"
    ).fetchall()
    assert counts == [(r, 120, 120 * r) for r in range(ranks)]
    assert verify_run(root).problems == []
