"""What an adapter is: it derives a plan, resolves the user's overrides, and listens to one forward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from loopscope.capture.capabilities import BackendSupport
from loopscope.capture.spec import CapturePlan
from loopscope.trace import TraceMeta, TracePoint, VisitSpec


@dataclass(frozen=True, slots=True)
class LossParts:
    """What one forward's output says of the objective; device scalars, detached. They add up over the microbatches
    of a step where `is_partial`, and are averaged otherwise."""

    total: Any
    """What backward runs on."""
    lb: Any
    """Load-balancing loss in loopscope's convention (1 when balanced), or None where the objective has none."""
    lb_factor: float
    """Its factor in the total."""
    is_partial: bool
    """True where the loss was divided by the tokens of all microbatches."""


@dataclass(frozen=True, slots=True)
class Remark:
    """What a forward did not do as it was promised or expected to, as a health row says it."""

    event: str
    """Name of the health row."""
    severity: Literal["info", "warn"]
    """"info" where nothing is wrong with it."""
    detail: str
    """In words, with the fix."""


@runtime_checkable
class Recording(Protocol):
    """One forward that was listened to."""

    def points(self, *, verify: bool = True) -> list[TracePoint]:
        """Every visit, proven. Raises CoverageError or ReconcileError."""

    def meta(self) -> TraceMeta:
        """R and L of this forward."""

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called with the forward's arguments, before everything else."""

    def remarks(self) -> list[Remark]:
        """What this forward did not do as it was promised or expected to."""

    def blocks(self) -> list[str]:
        """The module name of each visit, in the order of `points`."""

    def clear(self) -> None:
        """Let go of every tensor."""


@runtime_checkable
class Adapter(Protocol):
    """Observes models of one backend. Making one runs no model, allocates no tensor and opens no file."""

    model: Any
    plan: CapturePlan

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """The visits of one forward; empty where their number is not fixed."""

    def promised_meta(self) -> TraceMeta | None:
        """The TraceMeta of a forward that keeps this promise; None where the depth is not fixed."""

    def settings(self) -> Mapping[str, Any]:
        """Fields of `RunSettings` that the model itself shows (compiled, sharded, ...)."""

    def backend_support(self) -> BackendSupport:
        """Answers one requirement at a time."""

    def module(self, name: str) -> Any:
        """The module of this name in the plan."""

    def listening(self) -> AbstractContextManager[Recording]:
        """Capture whatever forward runs in the body."""

    def install(
        self,
        before: Callable[[], None],
        after: Callable[[tuple[Any, ...], Mapping[str, Any], Any, bool], None],
    ) -> Callable[[], None]:
        """Call `before` and `after` (positional and keyword arguments, output, whether the forward failed) around every
        forward of the model; returns what undoes it."""

    def is_training(self) -> bool:
        """True where the coming forward is one of training."""

    def in_backward(self) -> bool:
        """True where the coming forward is a recompute within backward."""

    def ignored(self) -> str:
        """Why the coming forward is none of training, in words."""

    def valid(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        points: Sequence[TracePoint],
        blocks: Sequence[str],
    ) -> Any:
        """Tokens that are no padding, of the visits of a forward that has just been recorded: [B, S] bool; by
        `unrolled_pos` where visits differ in theirs; None where every token counts.

        Args:
            args: of the forward.
            kwargs: of the forward.
            points: its visits.
            blocks: the module of each.

        Raises:
            MaskError: the forward was given a mask that cannot be read, or does not fit.
        """

    def losses(self, kwargs: Mapping[str, Any], output: Any) -> LossParts | None:
        """The objective's parts, where the output holds them."""
