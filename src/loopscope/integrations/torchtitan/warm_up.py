"""Compile the reductions for a run's own shapes, before its first step."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torchtitan.tools.logging import logger

from loopscope.collect import reduce_trace
from loopscope.metrics import WarmUp, warm_up_like
from loopscope.trace import NullCollector, TraceMeta, TraceSink, run_probe_forward


class _ShapeTaker(NullCollector):
    """Reduces one trace for its shapes alone."""

    done: WarmUp | None = None

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor
    ) -> dict[str, float]:
        """Note the shapes of `sink`, compile for them."""
        self.done = warm_up_like(lambda: reduce_trace(sink, meta))
        return {}


def compile_reductions(
    model: nn.Module, tokens_BS: Tensor, context: Callable[[], AbstractContextManager[object]]
) -> WarmUp | None:
    """Run one forward of the training shape, isolated as a probe is, and compile what its trace needs.

    Collective: every rank calls it. Announced in the log before it starts, and with its time when it is done;
    a kernel that cannot be made is named, and its visits are reduced eagerly.

    Args:
        model: the trainer's.
        tokens_BS: token ids of the training's shape, on its device.
        context: makes the trainer's own context of a forward.
    """
    taker = _ShapeTaker()
    logger.info("loopscope: compiling the reductions of a trace; this takes some seconds for each shape")
    run_probe_forward(model, tokens_BS, collector=taker, step=0, context=context)
    if (done := taker.done) is not None:
        logger.info(f"loopscope: {done.compiled} reduction(s) compiled in {done.seconds:.1f} s")
        for reason in done.failed:
            logger.warning(f"loopscope: reduced eagerly, since it cannot be compiled: {reason}")
    return done
