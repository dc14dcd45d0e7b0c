"""What metrics require, tensor by tensor, from the catalogue."""

from dataclasses import dataclass
from typing import Literal

from loopscope.capture.errors import PlanError
from loopscope.catalog.registry import TRAINING_METRICS

Placement = Literal["local", "replicated", "sequence-sharded"]

# tensor → its only valid semantic shape
_SHAPES = {
    "router_logits": "B S E",
    "router_probs": "B S E",
    "choice_scores": "B S E",
    "topk_idx": "B S k",
    "topk_weights": "B S k",
    "expert_bias": "E",
    "residual": "B S d",
    "before_residual": "B S d",
    "dropped_assignments": "E",
    "loss": "",
    "aux_loss": "",
    "grad_norm": "",
    "lr": "",
    "per_token_loss": "B S",
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing a metric needs."""

    tensor: str
    """Name of the tensor, or of a number of the objective."""
    shape: str
    """Semantic shape, axes separated by spaces; empty for a scalar."""
    pre_softmax: bool | None = None
    """True where it must be raw, False where it must be normalised, None where it does not matter."""
    placement: Placement = "local"
    """Where the tokens of the tensor must live."""
    state: str | None = None
    """State kept between visits, such as the previous loop step's residual."""

    @property
    def problem(self) -> str | None:
        """Why no backend could ever meet it; None where it is valid."""
        if (expected := _SHAPES.get(self.tensor)) is None:
            return f"no tensor {self.tensor!r} is known"
        if expected != self.shape:
            return f"{self.tensor} has axes {expected!r}, not {self.shape!r}"
        if self.tensor == "router_logits" and self.pre_softmax is False:
            return "router_logits are before softmax by definition; ask for router_probs"
        if self.tensor == "router_probs" and self.pre_softmax is True:
            return "router_probs are after softmax by definition; ask for router_logits"
        return None


def requirement(tensor: str) -> Requirement:
    """The requirement that stands for a name in `Column.requires` or `Column.needs`."""
    if tensor not in _SHAPES:
        raise PlanError(f"no requirement {tensor!r}; known: {', '.join(_SHAPES)}")
    return Requirement(
        tensor,
        _SHAPES[tensor],
        pre_softmax={"router_logits": True, "router_probs": False}.get(tensor),
        state="previous_residual" if tensor == "before_residual" else None,
    )


def requirements_by_metric() -> dict[tuple[str, str], tuple[Requirement, ...]]:
    """(table, column) → what it needs, over every metric of training."""
    return {
        key: tuple(requirement(tensor) for tensor in column.requires or column.needs)
        for key, column in TRAINING_METRICS.items()
    }
