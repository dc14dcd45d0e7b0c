"""Ready configurations for ``--module loopscope.integrations.torchtitan.configs --config NAME``."""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from loopscope.integrations.torchtitan.options import LoopscopeOptions
from loopscope.integrations.torchtitan.text import DATASET_NAME
from loopscope.integrations.torchtitan.trainer import LoopscopeTrainer
from loopscope.models.loopmoe import FLAVORS, model_registry


def debug() -> LoopscopeTrainer.Config:
    """The `debug` flavour: trains on two CPU cores."""
    return _config("debug", local_batch_size=4, seq_len=128, lr=1e-3)


def wide() -> LoopscopeTrainer.Config:
    """The `wide` flavour: loop E 64, R 4, L 4, d 512; for measuring what tracing costs."""
    return _config("wide", local_batch_size=2, seq_len=256, lr=5e-4)


def _config(flavor: str, *, local_batch_size: int, seq_len: int, lr: float) -> LoopscopeTrainer.Config:
    return LoopscopeTrainer.Config(
        model_spec=model_registry(flavor),
        loss=CrossEntropyLoss.Config(global_vocab_size=FLAVORS[flavor].vocab_size),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20),
        training=TrainingConfig(
            local_batch_size=local_batch_size,
            seq_len=seq_len,
            steps=120,
            mixed_precision_param="float32",
            # A replayed graph runs no Python, so a trace would be empty.
            disable_cuda_graphs=True,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASET_NAME),
        metrics=MetricsProcessor.Config(log_freq=10),
        # Whole checkpoints, also the last: a run that ended can be continued.
        checkpoint=CheckpointManager.Config(enable=True, interval=50, last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        loopscope=LoopscopeOptions(),
    )
