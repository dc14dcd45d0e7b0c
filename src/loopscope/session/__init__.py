"""Wires a run together: configuration, run directory, attempt, writer, collector."""

from loopscope.session.config import LoopscopeConfig
from loopscope.session.run import Loopscope
from loopscope.session.schedule import is_probe_step, is_trace_step

__all__ = ["Loopscope", "LoopscopeConfig", "is_probe_step", "is_trace_step"]
