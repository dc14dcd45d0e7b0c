"""How a router chooses and weighs its experts, stated explicitly, with where each value was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion

ScoreFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Balancing = Literal["auxiliary_loss", "probability_bias", "none", "unknown"]
Order = Literal["score_then_topk", "topk_then_score"]
Choice = Literal["top_k", "expert_choice", "soft", "sampled", "given"]
Weights = Literal["from_scores", "proportional", "own"]
BiasOn = Literal["scores", "logits"]
GroupScore = Literal["top2_sum", "maximum", "sum"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "score_func": get_args(ScoreFunc),
    "order": get_args(Order),
    "balancing": get_args(Balancing),
    "choice": get_args(Choice),
    "weights": get_args(Weights),
    "bias_on": get_args(BiasOn),
    "group_score": get_args(GroupScore),
}


_SILENT = frozenset({"choice", "variable_k", "weights", "bias_in_weights", "null_experts", "group_score"})
"""Fields of unusual routers, which a plain one does not mention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSpec:
    """The routing of one layer. Nothing that changes a number has a default."""

    num_experts: int
    """E, routed experts that compute; from the configuration, never from the largest index seen."""
    top_k: int
    """k, experts per token; the most, where it varies. E where experts choose, or routing is soft."""
    score_func: ScoreFunc
    """How scores come from logits."""
    order: Order
    """Whether scores are taken over all experts before the choice, or over the chosen after it."""
    normalised: bool
    """True where the combine weights of a token are divided by their sum."""
    balancing: Balancing
    """What keeps the load even; "unknown" is an answer, None is not."""
    choice: Choice = "top_k"
    """Who chooses: each token the k highest scores ("top_k"), each expert the tokens that score highest with it
    ("expert_choice"), nobody ("soft"); or the choice is drawn ("sampled"), or comes from something else than the
    scores, such as a table of token ids ("given")."""
    variable_k: bool = False
    """True where a token may take fewer than k experts: a threshold, a top-p."""
    weights: Weights = "from_scores"
    """How combine weights follow: from the chosen scores as the other fields say; up to a factor of each token
    ("proportional"); or not at all ("own"), in which case they must be captured."""
    bias_on: BiasOn | None = None
    """What the expert bias is added to; None: to what the top-k runs on, logits under topk_then_score, else scores."""
    bias_in_weights: bool = False
    """True where the combine weights come from biased scores as well."""
    null_experts: int = 0
    """Experts behind the E, in the router's scores and indices, that compute nothing (zero, skip, identity)."""
    gate_bias: bool = False
    """True where the gate is affine: its bias is part of the logits."""
    route_scale: float = 1.0
    """Factor on the combine weights."""
    num_groups: int | None = None
    """Groups of experts, where the choice is limited to some of them."""
    groups_per_token: int | None = None
    """Groups that a token may choose from."""
    group_score: GroupScore = "top2_sum"
    """What ranks the groups: the sum of a group's two best choice scores, its best, or the sum of all."""
    shared_experts: int = 0
    """Experts that every token visits beside the chosen ones."""
    dropless: bool = True
    """False where a capacity drops assignments; `dispatch`, `combine` or `kept` then tells which ran."""
    forced_balance: bool = False
    """True where a debugging switch assigns experts round-robin, whatever the scores."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field → where its value was read, such as "config.num_experts_per_tok"."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "bias_on" and value is None):
                raise PlanError(
                    f"routing.{name} is {value!r}, expected one of {', '.join(map(repr, allowed))}."
                    + (" Say 'unknown' where it is not known." if name == "balancing" else "")
                )
        for name in ("num_experts", "top_k", "shared_experts", "null_experts"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int):
                raise PlanError(f"routing.{name} is {value!r}, expected an integer.")
        for name in (
            "normalised", "gate_bias", "dropless", "forced_balance", "variable_k", "bias_in_weights"
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"routing.{name} is {getattr(self, name)!r}, expected True or False.")
        if not 1 <= self.top_k <= self.num_experts:
            raise PlanError(
                f"routing has top_k={self.top_k}, num_experts={self.num_experts}; expected "
                "1 <= top_k <= num_experts: a token cannot choose more experts than there are."
            )
        if self.choice in ("expert_choice", "soft") and self.top_k != self.num_experts:
            raise PlanError(
                f"routing has choice={self.choice!r} and top_k={self.top_k}, expected top_k={self.num_experts}: a "
                "token may be with every expert."
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
    def width(self) -> int:
        """Entries of a token's logits: the experts, and those that compute nothing."""
        return self.num_experts + self.null_experts

    @property
    def logit_bias(self) -> bool:
        """True where the expert bias is added to logits."""
        return (self.bias_on or ("logits" if self.order == "topk_then_score" else "scores")) == "logits"

    @property
    def open_choice(self) -> bool:
        """True where a token may be with fewer than k experts."""
        return self.variable_k or self.null_experts > 0 or not self.dropless or self.choice == "expert_choice"

    @property
    def traits(self) -> tuple[str, ...]:
        """What is unusual about it, of `loopscope.catalog.traits`."""
        alone = self.grouped and self.top_k * (self.num_groups or 1) == self.num_experts * (
            self.groups_per_token or 0
        )
        found = {
            "soft": self.choice == "soft",
            "expert_choice": self.choice == "expert_choice",
            "variable_k": self.variable_k or self.null_experts > 0,
            "unranked": self.choice in ("sampled", "given"),
            "drops": not self.dropless,
            "null_experts": self.null_experts > 0,
            "grouped": self.grouped,
            "no_alternative": alone,
        }
        return tuple(name for name, holds in found.items() if holds)

    @property
    def weights_sum_to_one(self) -> bool:
        """True where the model's own combine weights sum to 1."""
        after = self.order == "topk_then_score" and self.score_func == "softmax"
        return (self.normalised or after) and self.route_scale == 1.0 and self.weights == "from_scores"

    def plain(self) -> dict[str, Any]:
        """Plain types, defaults left out where they say nothing."""
        found = {known.name: getattr(self, known.name) for known in fields(self)} | {
            "sources": dict(self.sources)
        }
        unset = {known.name: known.default for known in fields(self) if known.name in _SILENT}
        return {
            name: value
            for name, value in found.items()
            if value is not None and value != {} and (name not in unset or value != unset[name])
        }


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
