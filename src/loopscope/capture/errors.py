"""Errors of capture; both are what a caller would expect without knowing loopscope."""

from loopscope.errors import ConfigError, TraceError


class PlanError(ConfigError):
    """A capture plan is wrong. Raised before anything is attached; the message names the place."""


class ReconcileError(TraceError):
    """What was captured is not what the model used: a wrong tensor, tuple order or softmax."""


class CoverageError(TraceError):
    """The routers that were found or called are not the MoE layers that the model declares."""
