from __future__ import annotations

from collections.abc import Mapping

import pytest
from capture_models import Recurrent, plan

from loopscope.capture import PlanError, Requirement, synthesize
from loopscope.capture.capabilities import InvalidRequirementError
from loopscope.capture.requirements import requirement, requirements_by_metric
from loopscope.capture.torch_adapter import TorchAdapter
from loopscope.catalog.registry import TRAINING_METRICS


class Silent:
    """A backend that declares nothing, and notes what it is asked."""

    def __init__(self, direct: set[str] = frozenset(), derived: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.asked: list[tuple[str, str]] = []
        self._direct, self._derived = direct, derived

    def facts(self) -> Mapping[str, str]:
        return {}

    def supports_direct(self, req: Requirement) -> bool:
        self.asked.append(("direct", req.tensor))
        return req.tensor in self._direct

    def supports_transform(self, req: Requirement) -> bool:
        self.asked.append(("transform", req.tensor))
        return req.tensor in self._derived

    def supports_state(self, component: str, dtype: str, placement: str) -> bool:
        self.asked.append(("state", component))
        return False

    def why_absent(self, req: Requirement) -> str:
        return f"no {req.tensor}"


def test_everything_is_absent_until_declared() -> None:
    found = synthesize(requirements_by_metric(), Silent())
    assert set(found) == set(TRAINING_METRICS)
    assert {item.status for item in found.values()} == {"absent"}
    assert all(item.reason for item in found.values())


def test_direct_is_asked_before_transform_and_each_requirement_once() -> None:
    support = Silent(direct={"topk_idx"}, derived={"topk_weights"})
    wanted = {
        ("t", "a"): [requirement("topk_idx")],
        ("t", "b"): [requirement("topk_idx"), requirement("topk_weights")],
    }
    found = synthesize(wanted, support)
    assert support.asked == [
        ("direct", "topk_idx"),
        ("direct", "topk_weights"),
        ("transform", "topk_weights"),
    ]
    assert [found[key].status for key in wanted] == ["direct", "transform"]


def test_state_is_asked_first_and_its_absence_is_final() -> None:
    support = Silent(direct={"before_residual"})
    found = synthesize({("t", "a"): [requirement("before_residual")]}, support)
    assert support.asked == [("state", "previous_residual")]
    assert found["t", "a"].status == "absent"


@pytest.mark.parametrize(
    "bad",
    [Requirement("router_logits", "B S k", True), Requirement("router_logits", "B S E", False),
     Requirement("router_probs", "B S E", True), Requirement("router_logit", "B S E")],
)  # fmt: skip
def test_a_backend_is_never_asked_about_an_invalid_requirement(bad: Requirement) -> None:
    support = Silent()
    with pytest.raises(InvalidRequirementError) as error:
        synthesize({("t", "a"): [requirement("topk_idx"), bad]}, support)
    assert support.asked == []
    assert error.value.requirement is bad


def test_the_set_is_immutable() -> None:
    found = synthesize(requirements_by_metric(), Silent())
    with pytest.raises(TypeError):
        found["router", "margin_mean"] = None  # type: ignore[index]


def test_a_plan_gives_what_it_captures_and_says_why_not() -> None:
    support = TorchAdapter(Recurrent(), overrides=plan()).backend_support()
    found = synthesize(requirements_by_metric(), support)
    assert found["router", "margin_mean"].status == "direct"
    assert found["router", "mean_prob"].status == "transform"
    assert found["residual", "norm_mean"].status == "direct"
    assert "dropless" in found["router", "dropped_assignments"].reason
    assert found["loss", "task_loss"].status == "absent"
    dense = {"core.?": {"tensors": {"residual": "output"}, "placements": {}, "merge": "sum"}}
    bare = synthesize(requirements_by_metric(), TorchAdapter(Recurrent(), overrides=dense).backend_support())
    assert "plan captures none" in bare["router", "margin_mean"].reason


def test_require_fails_with_the_reason_or_the_nearest_name() -> None:
    found = synthesize(requirements_by_metric(), Silent(direct={"residual"}))
    found.require(["norm_mean", "residual.rms"])
    with pytest.raises(PlanError, match=r"router.margin_mean is absent: no choice_scores"):
        found.require(["margin_mean"])
    with pytest.raises(PlanError, match="Did you mean 'margin_mean'"):
        found.require(["margin_means"])
