"""The exception tree: everything loopscope raises on purpose derives from `LoopscopeError`.

Every message says what was got, what was expected, and the fix. The classes also derive from the built-in
exception a caller would expect (ValueError for a wrong value, RuntimeError for a wrong moment), so code that
knows nothing of loopscope still catches them sensibly.
"""


class LoopscopeError(Exception):
    """Base of every error that loopscope raises on purpose."""


class ConfigError(LoopscopeError, ValueError):
    """A configuration value or command-line argument is wrong."""


class UnsupportedError(ConfigError):
    """A setting of the trainer that loopscope cannot honour yet; the message names the flag to change."""


class TraceError(LoopscopeError, RuntimeError):
    """The trace contract was broken at run time (armed twice, recorded twice, ...)."""


class LeakError(TraceError):
    """A trace tensor or its storage outlived the callback that it was handed to."""


class MetricInputError(LoopscopeError, ValueError):
    """Tensors handed to a metric break its contract (shape, range, probabilities handed in as logits, ...)."""


class StoreError(LoopscopeError, RuntimeError):
    """Rows could not be written or read."""


class NotARunError(StoreError, FileNotFoundError):
    """The folder does not hold a loopscope run."""

    # FileNotFoundError formats (errno, text) pairs; a plain message reads better.
    __str__ = Exception.__str__


class RunExistsError(StoreError, FileExistsError):
    """The folder already holds another run, or another process writes it."""

    __str__ = Exception.__str__


class UnreadableError(StoreError):
    """Rows of a table were written, and none of them can be read."""


class LeftOutWarning(UserWarning):
    """An answer lacks rows of a run, since some of its files could not be read. No error: the others are there."""


class SupersededError(StoreError):
    """Another process has taken the run over: what this one writes from here on is superseded."""


class SchemaError(StoreError, ValueError):
    """Rows or files do not fit the table's schema."""


class CheckpointMismatchError(StoreError, ValueError):
    """A checkpoint belongs to another run than the one being resumed."""


class ProbeError(LoopscopeError, RuntimeError):
    """A probe forward cannot be run, or its corpus does not fit the model."""
