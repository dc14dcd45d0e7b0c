"""A machine's own figures: read off the training's thread, turned into rows. Knows no run, no trainer, no storage."""

from loopscope.system.sampler import SystemSampler

__all__ = ["SystemSampler"]
