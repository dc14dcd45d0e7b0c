"""Probes on two ranks with FSDP2: training goes on bit for bit, also when one rank's own code fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("probe_ranks_job.py")


@pytest.mark.ranks
def test_two_sharded_ranks_train_on_as_if_no_probe_had_run():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(JOB)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
