"""Several trainings from torchtitan's command line in one process, since starting torch costs more than training.

``python train_driver.py ARGUMENTS.json``: a list of lists of arguments.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "torchtitan"))

import driver
import torch.distributed as dist
import torchtitan.trainer

from loopscope.integrations.torchtitan import launch


def main() -> int:
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    torchtitan.trainer.time.sleep = lambda seconds: None
    driver.share_meshes()
    dist.destroy_process_group = lambda *_: None  # the next training goes on with it
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        if launch.main(arguments):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
