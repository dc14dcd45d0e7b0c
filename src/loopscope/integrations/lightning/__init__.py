"""loopscope inside a Lightning trainer: ``Trainer(..., callbacks=[loopscope_callback(out=RUN)])``."""

from loopscope.integrations.lightning.callback import loopscope_callback

__all__ = ["loopscope_callback"]
