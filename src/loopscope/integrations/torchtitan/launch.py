"""One rank of a run: ``torchrun ... -m loopscope.integrations.torchtitan.launch --module M --config F ...``.

It takes what ``torchtitan.train`` takes, and makes torchtitan run on CPU where there is no accelerator. An error
that names a wrong setting ends with exit status 2 and one message instead of a traceback.
"""

import os
import sys
from typing import Any

from loopscope.errors import ConfigError, LoopscopeError
from loopscope.integrations.torchtitan.text import DATASET_NAME, register_dataset
from loopscope.models import cpu_compat

MODULE = "loopscope.integrations.torchtitan.configs"
"""The `--module` of the ready configurations."""


def main(args: list[str] | None = None) -> int:
    """Parse, build the trainer, train, close. Returns the exit status."""
    cpu_compat.enable()
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = None
    try:
        config = _parse(args)
        if config.dataloader.dataset_path and config.dataloader.dataset == DATASET_NAME:
            register_dataset(DATASET_NAME, config.dataloader.dataset_path)
        trainer = config.build()
        trainer.train()
    except LoopscopeError as error:
        _report(error)
        return 2
    finally:
        if trainer is not None:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _parse(args: list[str] | None) -> Any:
    from torchtitan.config import ConfigManager

    class Manager(ConfigManager):
        """Checks the type of a configuration before flags are applied: each flag would else be reported as unknown."""

        def _load_config(self, args: list[str]) -> tuple[object, list[str]]:
            loaded, left = super()._load_config(args)
            if not hasattr(loaded, "loopscope"):
                kind = type(loaded)
                raise ConfigError(
                    f"the configuration is {kind.__module__}.{kind.__qualname__}, expected LoopscopeTrainer.Config; "
                    "a plain trainer records nothing. Let its function return LoopscopeTrainer.Config(...) of "
                    "loopscope.integrations.torchtitan with the same fields, or a subclass."
                )
            return loaded, left

    try:
        return Manager().parse_args(args)
    except (ValueError, ImportError) as error:
        # An unknown --module or --config, or a value that torchtitan's own checks refuse.
        raise ConfigError(str(error)) from error


def _report(error: LoopscopeError) -> None:
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not str(error).startswith("rank 0: "):  # which rank 0 says itself
        where = "" if rank == "0" else f" on rank {rank}"
        print(f"loopscope{where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
