from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from capture_models import BLOCK, ROUTER, ROUTER_TENSORS, ROUTING, Recurrent, plan

from loopscope.capture import Capture, CapturePlan, CaptureSpec, PlanError, RoutingSpec, reducer, resolve_plan
from loopscope.capture.files import dump_plan, parse_overrides
from loopscope.capture.hooks import plain_modules

MODULES = plain_modules(Recurrent())
DERIVED = CapturePlan(
    {
        "core.0": CaptureSpec(tensors={"residual": "output"}, layer=0, calls=3, placements={"dp": "local"}),
        "core.0.moe": CaptureSpec(tensors=ROUTER_TENSORS, routing=RoutingSpec(**ROUTING)),
    }
)


@reducer(collective=False, context=("module",))
def spread(*, module: Any, power: float = 2.0) -> Any:
    return lambda tensors: {"std": float(tensors["residual"].std()) ** power}


def undeclared(module: Any) -> Any:
    return lambda tensors: {}


# ruff: noqa: E501
WRONG: dict[str, tuple[dict[Any, Any], str]] = {
    "typo in a module's name": ({"core.0.mo": {"merge": "sum"}}, "Did you mean 'core.0.moe'"),
    "typo in a field": ({"core.0": {"tensor": {}}}, "no field 'tensor'. Did you mean 'tensors'"),
    "typo in a tensor": ({"core.0": {"tensors": {"residul": "output"}}}, "Did you mean 'residual'"),
    "typo in an axis": ({"core.0": {"placements": {"dp_shart": "local"}}}, "no mesh axis 'dp_shart'. Did you mean 'dp_shard'"),
    "unknown placement": ({"core.0": {"placements": {"dp": "replicate"}}}, "Did you mean 'replicated'"),
    "unknown merge": ({"core.0": {"merge": "mean"}}, "expected one of"),
    "unreadable source": ({"core.0": {"tensors": {"residual": "outputs[0"}}}, "cannot be read"),
    "source that is no text": ({"core.0": {"tensors": {"residual": 0}}}, "source is 0"),
    "unknown decoder": ({"core.0": {"tensors": {"residual": "decode.gate"}}}, "no decoder 'gate'"),
    "glob without match": ({"blocks.*": {"merge": "sum"}}, "the glob matches no module"),
    "glob that meets strangers": ({"core.*": {"merge": "sum"}}, "matches are no boundaries: core.0.norm"),
    "sentinel on an insert": (
        {"prelude": {"tensors": "auto", "placements": {}, "merge": "sum"}}, "nothing was derived"
    ),
    "unset insert": ({"prelude": {}}, "forward(x, scale=1.0)"),
    "half an insert": ({"prelude": {"tensors": {"residual": "output"}}}, "placements, merge not set"),
    "wrong type of an entry": ({"core.0": ["residual"]}, "got list, expected a mapping"),
    "wrong type of a field": ({"core.0": {"tensors": "output"}}, "tensors is str, expected a mapping"),
    "wrong type of calls": ({"core.0": {"calls": "3"}}, "expected an integer >= 1"),
    "a key that is no text": ({3: {"merge": "sum"}}, "expected the name of a module"),
    "unknown field of a routing": ({"core.0.moe": {"routing": {**ROUTING, "topk": 2}}}, "Did you mean 'top_k'"),
    "incomplete routing": ({"core.0.moe": {"routing": {"top_k": 2}}}, "routing is incomplete"),
    "impossible routing": ({"core.0.moe": {"routing": {**ROUTING, "top_k": 7}}}, "1 <= top_k <= num_experts"),
    "routing cleared": ({"core.0.moe": {"routing": "none"}}, "no `routing`"),
    "a router without logits": (
        {"core.0.moe": {"tensors": {"topk_idx": "output[1][2]"}}}, "without router_logits"
    ),
    "a router outside every block": ({"core.1.moe": ROUTER}, "a router outside every block"),
    "two routers in one block": (
        {"core.0.moe.gate": {**BLOCK, "tensors": {"router_logits": "output"}}}, "a visit has one router"
    ),
    "undeclared collective": ({"core.0": {"reducers": [{"use": undeclared}]}}, "must be declared"),
    "reserved context key": ({"core.0": {"reducers": [{"use": spread, "module": 1}]}}, "'module' is reserved"),
    "typo in a reducer's key": ({"core.0": {"reducers": [{"use": spread, "pow": 1}]}}, "no parameter 'pow'"),
    "reducers that are no list": ({"core.0": {"reducers": spread}}, "expected a list of reducers"),
    "a reducer that cannot be imported": ({"core.0": {"reducers": [{"use": "nowhere:f"}]}}, "expected 'module:function'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*drops what was derived")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_fails_with_its_place(name: str) -> None:
    overrides, message = WRONG[name]
    with pytest.raises(PlanError) as error:
        resolve_plan(DERIVED, overrides, MODULES)
    assert message in str(error.value)
    key = next(iter(overrides))
    assert str(key) in str(error.value)


def resolved(overrides: dict[str, Any]) -> CapturePlan:
    return resolve_plan(DERIVED, overrides, MODULES)


def test_merge_inherits_what_is_not_written_and_honours_what_is() -> None:
    spec = resolved({"core.0": {"calls": 5}})["core.0"]
    assert (spec.calls, spec.layer, dict(spec.tensors)) == (5, 0, {"residual": "output"})
    assert resolved({"core.0": Capture(calls=None)})["core.0"].calls is None


def test_an_explicit_empty_value_captures_nothing() -> None:
    with pytest.warns(UserWarning, match="drops what was derived: router_logits, topk_idx, topk_weights"):
        assert resolved({"core.0.moe": {"tensors": {}}})["core.0.moe"].tensors == {}


def test_sentinels_inherit_and_clear() -> None:
    spec = resolved({"core.0": {"calls": "auto", "layer": "none"}})["core.0"]
    assert (spec.calls, spec.layer) == (3, None)
    with pytest.warns(UserWarning, match="drops what was derived: dp"):
        assert resolved({"core.0": {"placements": "none"}})["core.0"].placements == {}


def test_an_exact_name_inserts_with_a_full_contract() -> None:
    found = resolved({"core.1": BLOCK, "core.1.moe": ROUTER})
    assert list(found) == ["core.0", "core.0.moe", "core.1", "core.1.moe"]


def test_globs_span_dots_are_case_sensitive_and_insert_only_full_contracts() -> None:
    assert sorted(resolve_plan(CapturePlan({}), plan(), MODULES)) == sorted([
        "prelude", "prelude.moe", "coda", "coda.moe", "core.0", "core.0.moe", "core.1", "core.1.moe"
    ])  # fmt: skip
    assert list(resolve_plan(CapturePlan({}), plan(), MODULES).blocks()) == [
        "prelude",
        "core.0",
        "core.1",
        "coda",
    ]
    with pytest.raises(PlanError, match="matches no module"):
        resolved({"Core.*": {"merge": "sum"}})
    assert resolved({"c*0": {"calls": 4}})["core.0"].calls == 4


def test_a_glob_names_up_to_eight_strangers() -> None:
    with pytest.raises(PlanError) as error:
        resolved({"*": {"merge": "sum"}})
    assert str(error.value).count(",") >= 8
    assert ", ...." in str(error.value) or ", ..." in str(error.value)


def test_planning_twice_gives_the_same_plan_and_changes_nothing() -> None:
    overrides = {"core.0": {"calls": 5, "placements": {"dp": "local"}}, "core.1": dict(BLOCK)}
    before = copy.deepcopy(overrides)
    first, second = resolved(overrides), resolved(overrides)
    assert dict(first) == dict(second)
    assert overrides == before
    assert DERIVED["core.0"].calls == 3


def test_yaml_can_be_edited_and_fed_back() -> None:
    text = dump_plan(resolved({"core.1": BLOCK, "core.1.moe": ROUTER}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = resolved(parse_overrides(text))
    assert dump_plan(again) == text
    assert resolved(parse_overrides(text.replace("calls: 3", "calls: 4")))["core.0"].calls == 4


def test_a_key_that_stands_twice_in_a_file_is_refused() -> None:
    with pytest.raises(PlanError, match=r"line 3: key 'core.0' stands there twice"):
        parse_overrides("core.0:\n  merge: sum\ncore.0:\n  merge: none\n")


def test_reducers_bind_their_keys() -> None:
    bound = resolved({"core.0": {"reducers": [{"use": spread, "power": 3.0}]}})["core.0"].reducers[0]
    assert bound.keys == {"power": 3.0}
    assert bound.factory.collective is False


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: reducer(collective="no"), "expected True or False"),  # type: ignore[arg-type]
        (lambda: reducer(collective=True, context=("models",)), "Did you mean 'module'"),
        (lambda: reducer(collective=True)(undeclared), "context that is not declared"),
        (lambda: reducer(collective=True)(lambda **keys: None), "would swallow misspelt keys"),
        (lambda: reducer(collective=True, context=("mesh",))(lambda: None), "is declared but no parameter"),
    ],
)
def test_a_reducer_says_what_it_wants_and_whether_it_communicates(declare: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        declare()
    with pytest.raises(TypeError, match="collective"):
        reducer()  # type: ignore[call-arg]
