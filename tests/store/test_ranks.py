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

# Ranks are forks of a process that has imported what they need; all have opened the run before the first one writes.
_RANKS = """
import os, sys
from loopscope.store import RunStore, StoreOptions
root, ranks = sys.argv[1], int(sys.argv[2])
(ready, is_ready), (go, give) = os.pipe(), os.pipe()

def write(rank):
    os.close(give)
    options = StoreOptions(on_error="raise", rotate_bytes=4000, tick_s=0.02, seal_in="thread")
    store = RunStore.open(root, options=options)
    writer = store.writer(attempt=1, writer=f"r{rank}")
    os.write(is_ready, b".")
    os.read(go, 1)  # until the parent closes its end
    for step in range(1, 41):
        for position in range(3):
            writer.append("router", {"step": step, "rank": rank, "world_size": ranks, "unrolled_pos": position,
                "aggregation_scope": "rank_local", "expert_count": [step, rank]})
    store.close()

children = []
for rank in range(ranks):
    pid = os.fork()
    if pid == 0:
        write(rank)
        sys.exit(0)
    children.append(pid)
os.close(is_ready)
seen = b""
while len(seen) < ranks and (more := os.read(ready, ranks)):
    seen += more
os.close(give)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]) or len(seen) != ranks)
"""


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_rank_writes_its_own_files(tmp_path: Path, ranks: int) -> None:
    root = tmp_path / "run"
    with RunStore.create(root, options=QUIET) as store:
        store.claim_attempt(first_step=1, world_size=ranks)
        done = subprocess.run(
            [sys.executable, "-c", _RANKS, str(root), str(ranks)], capture_output=True, text=True, timeout=120,
            check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    run = open_run(root)
    counts = run.sql(
        "select rank, count(*), sum(expert_count[2]) from router group by 1 order by 1"
    ).fetchall()
    assert counts == [(r, 120, 120 * r) for r in range(ranks)]
    assert verify_run(root).problems == []
