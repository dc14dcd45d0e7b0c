"""What a run asks of a trainer: how its ranks agree, its model, its probe corpus."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from loopscope.trace import TraceMeta, VisitSpec

T = TypeVar("T")


class Decide(Protocol):
    """Runs a function on rank 0 and gives its result, or its exception, to every rank."""

    def __call__(self, make: Callable[[], T], /) -> T:
        """Collective: every rank calls it."""


class TracedModel(Protocol):
    """A model that knows the trace contract."""

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """Every visit of one forward at the largest R."""

    def trace_meta(self) -> TraceMeta:
        """R and L of the next forward, and how they were counted."""


class Encoded(Protocol):
    """The parts of an encoded probe corpus that rows carry."""

    @property
    def name(self) -> str:
        """Name of the corpus."""

    @property
    def corpus_hash(self) -> str:
        """Hash over its tokens."""

    @property
    def strata(self) -> Mapping[str, Any]:
        """Stratum kind → one stratum per document."""
