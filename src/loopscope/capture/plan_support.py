"""The answers of a backend whose tensors come from a capture plan."""

from collections.abc import Mapping

from loopscope.capture.proof_status import proofs
from loopscope.capture.requirements import Placement, Requirement
from loopscope.capture.spec import CapturePlan
from loopscope.catalog.registry import TRAINING_METRICS
from loopscope.catalog.traits import TRAITS

_FACTS = ("num_experts", "top_k", "score_func", "order", "normalised", "balancing", "shared_experts")
_OBJECTIVE = ("loss", "aux_loss", "grad_norm", "lr")


class PlanSupport:
    """Answers from what a plan captures; nothing else is claimed.

    Args:
        plan: the resolved plan.
        objective: numbers of the objective that the backend knows: of "loss", "aux_loss", "grad_norm", "lr".
    """

    def __init__(self, plan: CapturePlan, *, objective: tuple[str, ...] = ()) -> None:
        self._plan, self._objective = plan, objective
        self._direct = {name for spec in plan.values() if spec.merge != "none" for name in spec.tensors}
        self._placements = {place for spec in plan.values() for place in spec.placements.values()}
        self._routings = [spec.routing for spec in plan.values() if spec.routing is not None]

    def facts(self) -> Mapping[str, str]:
        """What the plan says of the model's routing."""
        found = {"visits": str(len(self._plan.blocks())), "routers": str(len(self._routings))}
        for name in _FACTS if self._routings else ():
            values = dict.fromkeys(str(getattr(spec, name)) for spec in self._routings)
            origin = self._routings[0].sources.get(name)
            found[name] = ", ".join(values) + (f"  ({origin})" if origin else "")
        if self._routings:
            found["proof"] = "; ".join(dict.fromkeys(proofs(self._plan).values()))
        return found

    def undefined(self) -> Mapping[tuple[str, str], str]:
        """(table, column) → why it means nothing for any of the routers."""
        if not self._routings:
            return {}
        traits = set.intersection(*(set(spec.traits) for spec in self._routings))
        return {
            key: TRAITS[why[0]]
            for key, column in TRAINING_METRICS.items()
            if (why := [name for name in column.undefined_for if name in traits])
        }

    def supports_direct(self, req: Requirement) -> bool:
        """See `BackendSupport`."""
        if req.tensor in _OBJECTIVE:
            return req.tensor in self._objective
        if req.tensor == "choice_scores":
            plain = not any(spec.grouped for spec in self._routings)
            return plain and "router_logits" in self._direct and "expert_bias" not in self._direct
        if req.tensor == "before_residual":
            return "residual" in self._direct
        if req.tensor == "router_probs" and any(spec.score_func != "softmax" for spec in self._routings):
            return False  # scores of each expert alone are divided by their sum
        if req.tensor in ("router_probs", "topk_idx", "topk_weights") and any(
            spec.open_choice or spec.choice == "soft" for spec in self._routings
        ):
            return False
        if req.tensor == "topk_weights" and not all(spec.weights_sum_to_one for spec in self._routings):
            return False
        return req.tensor in self._direct and self._placements <= {"local"}

    def supports_transform(self, req: Requirement) -> bool:
        """Scores and weights follow from logits and choice; local tensors from replicated ones."""
        if req.tensor in ("router_probs", "topk_weights", "topk_idx", "choice_scores"):
            return "router_logits" in self._direct
        if req.tensor == "dropped_assignments":
            return any(not spec.dropless for spec in self._routings)
        return req.tensor in self._direct and self._placements <= {"local", "replicated"}

    def supports_state(self, component: str, dtype: str, placement: Placement) -> bool:
        """A residual is kept for the length of one forward, on its own device."""
        return component == "previous_residual" and dtype == "float32" and placement == "local"

    def why_absent(self, req: Requirement) -> str:
        """See `BackendSupport`."""
        if req.tensor == "dropped_assignments":
            return "the router is dropless"
        if req.tensor == "expert_bias":
            return "the router adds no bias to its scores"
        if req.tensor in _OBJECTIVE:
            return f"a forward's output does not tell {req.tensor}"
        known = req.tensor in self._direct
        return f"{req.tensor} is not local to a rank" if known else f"no {req.tensor}: the plan captures none"
