"""Local variables of a module's own code, for routers whose choice never leaves it.

They are read from the frame at its return, by a profile function that is there while that module runs in a traced
forward, and at no other time.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion
from loopscope.capture.source import Source


def code_of(function: Any) -> CodeType | None:
    """The code that runs where `function` is called, decorators that say what they wrap taken off; None: no Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def local_names(sources: Iterable[Source]) -> set[str]:
    """The variables that sources name."""
    return {str(source.path[0]) for source in sources if source.root == "local"}


def check_local_names(names: set[str], function: Any, where: str) -> None:
    """Raise PlanError where the code of `function` has no such variable."""
    if not names:
        return
    code = code_of(function)
    if code is None:
        raise PlanError(
            f"{where}: {function!r} is no Python code, so it has no local variables that a source could name."
        )
    known = (*code.co_varnames, *code.co_cellvars)
    for name in names:
        if name not in known:
            raise PlanError(f"{where}: {code.co_qualname} has no variable {name!r}.{suggestion(name, known)}")


class LocalVariables:
    """Values of some local variables of one function, each time it returns.

    Args:
        owner: the object whose method it is; calls of the same code on other objects are left alone.
        function: the bound method.
        names: the variables.
    """

    def __init__(self, owner: Any, function: Any, names: Iterable[str]) -> None:
        self._owner, self._code, self._names = owner, code_of(function), frozenset(names)
        self._before: list[Any] = []
        self._found: dict[str, Any] | None = None

    def start(self) -> None:
        """The function is about to be called."""
        before = sys.getprofile()
        self._before.append(before)
        if before is None or callable(before):
            sys.setprofile(self._profile(before))

    def stop(self) -> None:
        """The function has returned, or raised."""
        if not self._before:
            return
        before = self._before.pop()
        if before is None or callable(before):
            sys.setprofile(before)

    def take(self) -> Mapping[str, Any] | None:
        """The values of the last call, which are let go of here; None where it was not seen."""
        found, self._found = self._found, None
        return found

    @contextmanager
    def during(self) -> Iterator[None]:
        """Around one call."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _profile(self, before: Callable[..., Any] | None) -> Callable[[FrameType, str, Any], None]:
        def see(frame: FrameType, event: str, value: Any) -> None:
            if event == "return" and frame.f_code is self._code:
                values = frame.f_locals
                if values.get(frame.f_code.co_varnames[0]) is self._owner:
                    self._found = {name: values[name] for name in self._names if name in values}
            if before is not None:
                before(frame, event, value)

        return see
