"""The execution record of one traced forward: every call of every watched module, in order; names, no tensor.

Hooks write it, `places` reads it: what is a visit, in which pass, and where in the depth, follows from this alone.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["running", "forward", "recompute", "failed"]
"""What became of a call: `recompute` ran within a backward (activation checkpointing), `failed` raised."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a watched module."""

    module: str
    """Its name in the plan."""
    depth: int
    """Watched modules that were running when it began."""
    outcome: Outcome = "running"


@dataclass(slots=True)
class ExecutionRecord:
    """Filled by `enter` and `leave`; every call is left, or was cut off with the one around it."""

    calls: list[ModuleCall] = field(default_factory=list)
    """In the order in which they began."""
    ended: list[ModuleCall] = field(default_factory=list)
    """In the order in which they ended; a block's output is there when its call has."""
    _open: list[ModuleCall] = field(default_factory=list)

    def enter(self, module: str, *, in_backward: bool = False) -> None:
        """A call begins.

        Args:
            module: its name.
            in_backward: autograd is running, so that the call recomputes what an earlier one did.
        """
        call = ModuleCall(module, len(self._open), "recompute" if in_backward else "running")
        self.calls.append(call)
        self._open.append(call)

    def leave(self, module: str, *, failed: bool = False) -> bool:
        """A call ends; True where it was a forward that ended well.

        What began inside it and was never left was cut off by an exception.
        """
        while self._open:
            call = self._open.pop()
            cut_off = call.module != module
            if call.outcome == "running":
                call.outcome = "failed" if failed or cut_off else "forward"
            self.ended.append(call)
            if not cut_off:
                return call.outcome == "forward"
        return False

    def is_running(self, module: str) -> bool:
        """True while a call of it is under way."""
        return any(call.module == module for call in self._open)

    def forwards(self, modules: Container[str]) -> list[str]:
        """Names of those of `modules` that ran forward and ended well, one per call, in the order of their ends."""
        return [call.module for call in self.ended if call.outcome == "forward" and call.module in modules]
