"""loopscope inside `transformers.Trainer`: ``Trainer(..., callbacks=[loopscope_callback(out=RUN)])``."""

from loopscope.integrations.transformers.callback import LoopscopeCallback, loopscope_callback

__all__ = ["LoopscopeCallback", "loopscope_callback"]
