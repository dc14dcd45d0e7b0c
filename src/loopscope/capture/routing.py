"""How a router chooses and weighs its experts, stated explicitly, with where each value was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion

ScoreFunc = Literal["softmax", "sigmoid"]
Balancing = Literal["auxiliary_loss", "probability_bias", "none", "unknown"]
Order = Literal["score_then_topk", "topk_then_score"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "score_func": get_args(ScoreFunc),
    "order": get_args(Order),
    "balancing": get_args(Balancing),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSpec:
    """The routing of one layer. Nothing that changes a number has a default."""

    num_experts: int
    """E, routed experts; from the configuration, never from the largest index seen."""
    top_k: int
    """k, experts per token."""
    score_func: ScoreFunc
    """How scores come from logits."""
    order: Order
    """Whether scores are taken over all experts before the choice, or over the chosen after it."""
    normalised: bool
    """True where the combine weights of a token are divided by their sum."""
    balancing: Balancing
    """What keeps the load even; "unknown" is an answer, None is not."""
    gate_bias: bool = False
    """True where the gate is affine: its bias is part of the logits."""
    route_scale: float = 1.0
    """Factor on the combine weights."""
    num_groups: int | None = None
    """Groups of experts, where the choice is limited to some of them."""
    groups_per_token: int | None = None
    """Groups that a token may choose from."""
    shared_experts: int = 0
    """Experts that every token visits beside the chosen ones."""
    dropless: bool = True
    """False where a capacity drops assignments."""
    forced_balance: bool = False
    """True where a debugging switch assigns experts round-robin, whatever the scores."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field → where its value was read, such as "config.num_experts_per_tok"."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise PlanError(
                    f"routing.{name} is {value!r}, expected one of {', '.join(map(repr, allowed))}."
                    + (" Say 'unknown' where it is not known." if name == "balancing" else "")
                )
        for name in ("num_experts", "top_k", "shared_experts"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int):
                raise PlanError(f"routing.{name} is {value!r}, expected an integer.")
        for name in ("normalised", "gate_bias", "dropless", "forced_balance"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"routing.{name} is {getattr(self, name)!r}, expected True or False.")
        if not 1 <= self.top_k <= self.num_experts:
            raise PlanError(
                f"routing has top_k={self.top_k}, num_experts={self.num_experts}; expected "
                "1 <= top_k <= num_experts: a token cannot choose more experts than there are."
            )
        if (self.num_groups is None) != (self.groups_per_token is None):
            raise PlanError(
                "routing.num_groups and routing.groups_per_token are given together or not at all."
            )
        if unknown := set(self.sources) - {known.name for known in fields(self)}:
            raise PlanError(f"routing.sources names {sorted(unknown)}, which are no fields of a RoutingSpec.")
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    @property
    def grouped(self) -> bool:
        """True where a limit on groups really excludes experts."""
        return (
            self.num_groups is not None and self.num_groups > 1 and self.groups_per_token != self.num_groups
        )

    @property
    def weights_sum_to_one(self) -> bool:
        """True where the model's own combine weights sum to 1."""
        return (self.normalised or self.order == "topk_then_score") and self.route_scale == 1.0

    def plain(self) -> dict[str, Any]:
        """Plain types, defaults left out where they say nothing."""
        found = {known.name: getattr(self, known.name) for known in fields(self)} | {
            "sources": dict(self.sources)
        }
        return {name: value for name, value in found.items() if value is not None and value != {}}


def routing_from(value: Any, where: str) -> RoutingSpec:
    """A RoutingSpec from one, or from a mapping of its fields.

    Raises:
        PlanError: names `where`, the field that does not exist or is missing, and the nearest right name.
    """
    if isinstance(value, RoutingSpec):
        return value
    if not isinstance(value, Mapping):
        raise PlanError(f"{where}: routing is {type(value).__name__}, expected a RoutingSpec or a mapping.")
    known = [item.name for item in fields(RoutingSpec)]
    for name in value:
        if name not in known:
            raise PlanError(f"{where}: routing has no field {name!r}.{suggestion(str(name), known)}")
    try:
        return RoutingSpec(**value)
    except TypeError as error:
        raise PlanError(f"{where}: routing is incomplete: {error}.") from None
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
