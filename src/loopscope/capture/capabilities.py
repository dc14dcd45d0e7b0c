"""Which metrics a model can really give: driven by requirements, and absent until declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion
from loopscope.capture.requirements import Placement, Requirement

Status = Literal["direct", "transform", "absent"]
Key = tuple[str, str]


class BackendSupport(Protocol):
    """Answers about one requirement at a time. Anything that is not declared is absent."""

    def facts(self) -> Mapping[str, str]:
        """What is known of the model, for people: E, k, score function and where they were read."""
        ...

    def supports_direct(self, req: Requirement) -> bool:
        """True where the tensor can be handed over as it is."""
        ...

    def supports_transform(self, req: Requirement) -> bool:
        """True where it follows exactly from what can be handed over."""
        ...

    def supports_state(self, component: str, dtype: str, placement: Placement) -> bool:
        """True where `component` may be kept between visits in this dtype and placement."""
        ...

    def why_absent(self, req: Requirement) -> str:
        """One clause that says why a requirement is not met."""
        ...


@dataclass(frozen=True, slots=True)
class Capability:
    """What became of one metric."""

    status: Status
    """"direct", "transform" or "absent"."""
    reason: str = ""
    """Why it is absent, or what it is derived from; empty where it is direct."""


class CapabilitySet(Mapping[Key, Capability]):
    """(table, column) → Capability; immutable."""

    def __init__(self, found: Mapping[Key, Capability]) -> None:
        self._found = MappingProxyType(dict(found))

    def __getitem__(self, key: Key) -> Capability:
        return self._found[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def absent(self) -> dict[str, str]:
        """`table.column` → reason, of the metrics that are not there."""
        return {f"{key[0]}.{key[1]}": item.reason for key, item in self.items() if item.status == "absent"}

    def require(self, names: Iterable[str]) -> None:
        """Check metrics that were asked for explicitly.

        Args:
            names: `column`, or `table.column` where a column exists in several tables.

        Raises:
            PlanError: a name is no metric, or is absent; with the reason.
        """
        by_name: dict[str, list[Key]] = {}
        for key in self:
            by_name.setdefault(key[1], []).append(key)
            by_name.setdefault(f"{key[0]}.{key[1]}", []).append(key)
        for name in names:
            if name not in by_name:
                raise PlanError(f"require: no metric {name!r}.{suggestion(name, by_name)}")
            missing = [key for key in by_name[name] if self[key].status == "absent"]
            if missing:
                table, column = missing[0]
                raise PlanError(
                    f"require: {table}.{column} is absent: {self[missing[0]].reason}. Drop it from `require`, or "
                    "capture what it needs. `loopscope capabilities` lists what this model gives."
                )


class InvalidRequirementError(PlanError):
    """A requirement that no backend could ever meet."""

    def __init__(self, req: Requirement, problem: str) -> None:
        super().__init__(f"requirement {req.tensor}[{req.shape}] is not valid: {problem}.")
        self.requirement = req
        self.problem = problem


def synthesize(requirements: Mapping[Key, Iterable[Requirement]], support: BackendSupport) -> CapabilitySet:
    """Ask `support` for every requirement, each once, in the mapping's order; direct before transform.

    Args:
        requirements: (table, column) → what it needs.
        support: the backend's answers.

    Raises:
        InvalidRequirementError: a requirement is semantically invalid; the backend is never asked about it.
    """
    wanted = {key: tuple(reqs) for key, reqs in requirements.items()}
    for reqs in wanted.values():
        for req in reqs:
            if req.problem is not None:
                raise InvalidRequirementError(req, req.problem)
    answers: dict[Requirement, Capability] = {}
    for reqs in wanted.values():
        for req in reqs:
            if req not in answers:
                answers[req] = _answer(req, support)
    return CapabilitySet({key: _joined([answers[req] for req in reqs]) for key, reqs in wanted.items()})


def _answer(req: Requirement, support: BackendSupport) -> Capability:
    if req.state is not None and not support.supports_state(req.state, "float32", req.placement):
        return Capability("absent", support.why_absent(req))
    if support.supports_direct(req):
        return Capability("direct")
    if support.supports_transform(req):
        return Capability("transform", f"{req.tensor} is derived")
    return Capability("absent", support.why_absent(req))


def _joined(parts: list[Capability]) -> Capability:
    for status in ("absent", "transform"):
        reasons = [part.reason for part in parts if part.status == status]
        if reasons:
            return Capability(status, "; ".join(dict.fromkeys(reasons)))
    return Capability("direct")
