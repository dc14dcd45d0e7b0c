"""Compile the reductions for a run's own shapes, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchtitan.tools.logging import logger

from loopscope.collect import reduce_trace
from loopscope.metrics import WarmUp, warm_up_like
from loopscope.trace import NullCollector, TraceMeta, TraceSink, run_probe_forward

if TYPE_CHECKING:
    from loopscope.integrations.torchtitan.trainer import LoopscopeTrainer


class _ShapeTaker(NullCollector):
    """Reduces one trace for its shapes alone."""

    done: WarmUp | None = None

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor
    ) -> dict[str, float]:
        """Note the shapes of `sink`, compile for them."""
        self.done = warm_up_like(lambda: reduce_trace(sink, meta))
        return {}


def compile_reductions(trainer: LoopscopeTrainer) -> WarmUp | None:
    """Run one forward of the training shape, isolated as a probe is, and compile what its trace needs.

    Collective: every rank calls it. Announced in the log before it starts, and with its time when it is done;
    a kernel that cannot be made is named, and its visits are reduced eagerly.
    """
    training = trainer.config.training
    tokens = torch.zeros(
        training.local_batch_size, training.seq_len, dtype=torch.int64, device=trainer.device
    )
    taker = _ShapeTaker()
    logger.info("loopscope: compiling the reductions of a trace; this takes some seconds for each shape")
    run_probe_forward(trainer.model, tokens, collector=taker, step=0, context=trainer.train_context)
    done = taker.done
    if done is not None:
        logger.info(f"loopscope: {done.compiled} reduction(s) compiled in {done.seconds:.1f} s")
        for reason in done.failed:
            logger.warning(f"loopscope: reduced eagerly, since it cannot be compiled: {reason}")
    return done
