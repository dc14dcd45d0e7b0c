"""Which metrics a model can really give: driven by requirements, and absent until declared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

from loopscope.capture.errors import PlanError
from loopscope.capture.frozen import FrozenMapping
from loopscope.capture.nearest import suggestion
from loopscope.capture.requirements import Placement, Requirement

Status = Literal["direct", "transform", "absent"]
Key = tuple[str, str]


class BackendSupport(Protocol):
    """Answers about one requirement at a time. Anything that is not declared is absent."""

    def facts(self) -> Mapping[str, str]:
        """What is known of the model, for people: E, k, score function and where they were read."""

    def supports_direct(self, req: Requirement) -> bool:
        """True where the tensor can be handed over as it is."""

    def supports_transform(self, req: Requirement) -> bool:
        """True where it follows exactly from what can be handed over."""

    def supports_state(self, component: str, dtype: str, placement: Placement) -> bool:
        """True where `component` may be kept between visits in this dtype and placement."""

    def why_absent(self, req: Requirement) -> str:
        """One clause that says why a requirement is not met."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What became of one metric."""

    status: Status
    """"direct", "transform" or "absent"."""
    reason: str = ""
    """Why it is absent, or what it is derived from; empty where it is direct."""


class CapabilitySet(FrozenMapping[Key, Capability]):
    """(table, column) → Capability; immutable."""

    def absent(self) -> dict[str, str]:
        """`table.column` → reason, of the metrics that are not there."""
        return {".".join(key): item.reason for key, item in self.items() if item.status == "absent"}

    def require(self, names: Iterable[str]) -> None:
        """Check metrics that were asked for explicitly.

        Args:
            names: `column`, or `table.column` where a column exists in several tables.

        Raises:
            PlanError: a name is no metric, or is absent; with the reason.
        """
        for name in names:
            if not (meant := [key for key in self if name in (key[1], ".".join(key))]):
                known = {form for key in self for form in (key[1], ".".join(key))}
                raise PlanError(f"require: no metric {name!r}.{suggestion(name, known)}")
            for key in meant:
                if self[key].status == "absent":
                    raise PlanError(
                        f"require: {'.'.join(key)} is absent: {self[key].reason}. Drop it from `require`, or "
                        "capture what it needs. `loopscope capabilities` lists what this model gives."
                    )


class InvalidRequirementError(PlanError):
    """A requirement that no backend could ever meet."""

    def __init__(self, req: Requirement, problem: str) -> None:
        super().__init__(f"requirement {req.tensor}[{req.shape}] is not valid: {problem}.")
        self.requirement, self.problem = req, problem


def synthesize(requirements: Mapping[Key, Iterable[Requirement]], support: BackendSupport) -> CapabilitySet:
    """Ask `support` for every requirement, each once, in the mapping's order; direct before transform.

    Args:
        requirements: (table, column) → what it needs.
        support: the backend's answers. Where it has `undefined()`, (table, column) → why a metric means nothing for
            this model, those are absent.

    Raises:
        InvalidRequirementError: a requirement is semantically invalid; the backend is never asked about it.
    """
    wanted = {key: tuple(reqs) for key, reqs in requirements.items()}
    void: Mapping[Key, str] = getattr(support, "undefined", dict)()
    each = dict.fromkeys(chain.from_iterable(wanted.values()))
    for req in each:
        if req.problem is not None:
            raise InvalidRequirementError(req, req.problem)
    answers = {req: _answer(req, support) for req in each}
    found = {key: _joined([answers[req] for req in reqs]) for key, reqs in wanted.items()}
    return CapabilitySet(
        {key: Capability("absent", void[key]) if key in void else one for key, one in found.items()}
    )


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
        if reasons := [part.reason for part in parts if part.status == status]:
            return Capability(status, "; ".join(dict.fromkeys(reasons)))
    return Capability("direct")
