"""Exceptions as text: a caught exception must not outlive its handler, since its frames hold tensors."""

import traceback
from pathlib import Path

from loopscope.store.redact import redact_text

_MAX_TEXT = 2000


def describe(error: BaseException) -> str:
    """Type, message and place of an exception in one line, and drop what its frames hold.

    The frames of finished calls are cleared, so that a reference to the exception that somebody else keeps
    no longer keeps the trace tensors that were those calls' local variables. A password or key in the message is
    left out: the text goes to health rows and logs.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames:
        last = frames[-1]
        where = f" (at {Path(last.filename).name}:{last.lineno} in {last.name})"
    text = f"{type(error).__name__}: {error}{where}"
    forget(error)
    return redact_text(text[:_MAX_TEXT])


def forget(error: BaseException) -> None:
    """Clear the frames of an exception and of the ones that led to it, and unlink their tracebacks."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if current.__traceback__ is not None:
            traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        todo += [current.__cause__, current.__context__]
