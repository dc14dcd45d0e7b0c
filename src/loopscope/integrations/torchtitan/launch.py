"""One rank of a run: ``torchrun ... -m loopscope.integrations.torchtitan.launch --module M --config F ...``.

It takes what ``torchtitan.train`` takes, and makes torchtitan run on CPU where there is no accelerator. An error
that names a wrong setting ends with exit status 2 and one message instead of a traceback.
"""

from __future__ import annotations

import os
import sys

from loopscope.errors import LoopscopeError
from loopscope.models import cpu_compat

MODULE = "loopscope.integrations.torchtitan.configs"
"""The `--module` of the ready configurations."""


def main(args: list[str] | None = None) -> int:
    """Parse, build the trainer, train, close. Returns the exit status."""
    cpu_compat.enable()
    import torch.distributed as dist
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = None
    try:
        config = ConfigManager().parse_args(args)
        if config.dataloader.dataset_path:
            from loopscope.integrations.torchtitan.text import DATASET_NAME, register_dataset

            if config.dataloader.dataset == DATASET_NAME:
                register_dataset(DATASET_NAME, config.dataloader.dataset_path)
        trainer = config.build()
        trainer.train()
    except LoopscopeError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"loopscope: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        if trainer is not None:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
