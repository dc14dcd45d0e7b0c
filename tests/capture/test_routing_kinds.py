"""Every kind of routing: counts are the experts' own inputs, what means nothing is null, mistakes are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from routers import (
    BATCH,
    EXPERTS,
    SEQ,
    TOKENS,
    Layer,
    Mixture,
    Oracle,
    Soft,
    expert_choice,
    gshard,
    gumbel,
    hashed,
    hidden,
    llama,
    switch,
    tokens,
    top_k,
    top_p,
    with_null_experts,
)
from torch import Tensor, nn

import loopscope
from loopscope.capture import PlanError, ReconcileError, decoder
from loopscope.capture.source import DECODERS, Call

BASE: dict[str, Any] = {
    "num_experts": EXPERTS, "top_k": 2, "score_func": "softmax", "order": "score_then_topk", "normalised": True,
    "balancing": "none",
}  # fmt: skip
IDX = {"router_logits": "output.logits", "topk_idx": "output.idx", "topk_weights": "output.weights"}
BIAS = {**IDX, "expert_bias": "module.bias"}


@dataclass(frozen=True)
class Kind:
    route: Any
    tensors: dict[str, str]
    routing: dict[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)

    def plan(self, **routing: Any) -> dict[str, Any]:
        spec = {**BASE, **self.routing, **routing}
        tensors = {"residual": "output.h", **self.tensors}
        return {"moe": {"tensors": tensors, "placements": {}, "merge": "sum", "routing": spec}}


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def sqrtsoftplus(x: Tensor) -> Tensor:
    return nn.functional.softplus(x).sqrt()


SIGMOID = {"score_func": "sigmoid", "balancing": "probability_bias"}
KINDS = {
    "plain": Kind(top_k(softmax), IDX, {}),
    "bias after the score": Kind(top_k(torch.sigmoid, bias="scores"), BIAS, SIGMOID),
    "bias before the score": Kind(top_k(torch.sigmoid, bias="logits"), BIAS, {**SIGMOID, "bias_on": "logits"}),
    "biased weights": Kind(
        top_k(torch.sigmoid, bias="logits", biased_weights=True),
        BIAS,
        {**SIGMOID, "bias_on": "logits", "bias_in_weights": True},
    ),
    "biased weights after the choice": Kind(
        top_k(softmax, bias="logits", biased_weights=True, after=True, normalised=False),
        BIAS,
        {"order": "topk_then_score", "balancing": "probability_bias", "bias_in_weights": True},
    ),
    "bias on logits, sigmoid after the choice": Kind(
        top_k(torch.sigmoid, bias="logits", after=True), BIAS, {**SIGMOID, "order": "topk_then_score"}
    ),
    "another score function": Kind(
        top_k(sqrtsoftplus, bias="scores"), BIAS, {**SIGMOID, "score_func": "sqrtsoftplus"}
    ),
    "groups by their two best": Kind(
        top_k(torch.sigmoid, bias="scores", groups="top2_sum"),
        BIAS,
        {**SIGMOID, "num_groups": 4, "groups_per_token": 2},
    ),
    "groups by their best": Kind(
        top_k(softmax, groups="maximum", normalised=False),
        IDX,
        {"normalised": False, "num_groups": 4, "groups_per_token": 2, "group_score": "maximum"},
    ),
    "groups that leave no choice": Kind(
        top_k(softmax, groups="maximum", k=4),
        IDX,
        {"top_k": 4, "num_groups": 4, "groups_per_token": 2, "group_score": "maximum"},
    ),
    "one-hot with a capacity": Kind(
        switch(),
        {"router_logits": "output.logits", "dispatch": "output.hot", "topk_weights": "output.best"},
        {"top_k": 1, "normalised": False, "dropless": False},
    ),
    "top 2 with a capacity, kept": Kind(gshard(), {**IDX, "kept": "output.kept"}, {"dropless": False}),
    "top 2 with a capacity, combine": Kind(
        gshard(), {"router_logits": "output.logits", "combine": "output.combine"}, {"dropless": False}
    ),
    "top 2 with a capacity, weighed after it": Kind(
        gshard(before=False),
        {"router_logits": "output.logits", "topk_idx": "output.idx", "combine": "output.combine"},
        {"dropless": False},
    ),
    "experts choose from the batch": Kind(
        expert_choice(per_sequence=False),
        {"router_logits": "output.logits", "token_idx": "output.chosen", "token_weights": "output.gates"},
        {"choice": "expert_choice", "top_k": EXPERTS, "normalised": False},
    ),
    "experts choose from sequences": Kind(
        expert_choice(per_sequence=True),
        {"router_logits": "output.logits", "token_idx": "output.chosen", "token_weights": "output.gates"},
        {"choice": "expert_choice", "top_k": EXPERTS, "normalised": False},
    ),
    "top-p": Kind(
        top_p,
        {"router_logits": "output.logits", "topk_idx": "output.idx", "combine": "output.combine"},
        {"top_k": 4, "variable_k": True, "normalised": False},
    ),
    "null experts": Kind(
        with_null_experts,
        IDX,
        {"num_experts": 6, "null_experts": 2, "top_k": 3, "normalised": False},
        {"experts": 6},
    ),
    "drawn": Kind(gumbel, IDX, {"choice": "sampled", "weights": "own"}),
    "by token number": Kind(hashed, IDX, {"choice": "given", "score_func": "sigmoid"}),
    "gates over all experts": Kind(
        llama,
        {"router_logits": "output.logits", "combine": "output.gates"},
        {"score_func": "sigmoid", "order": "topk_then_score", "normalised": False},
    ),
}  # fmt: skip
VALID = torch.arange(TOKENS).reshape(BATCH, SEQ) % SEQ < torch.tensor([12, 7, 10])[:, None]


def observed(
    model: nn.Module, plan: dict[str, Any], out: Path, valid: Tensor | None = None, **options: Any
) -> dict[str, list[dict[str, Any]]]:
    mask = {} if valid is None else {"valid": lambda args, kwargs: valid}
    with loopscope.attach(model.train(), out=out, plan=plan, on_error="raise", **mask, **options) as run:
        torch.manual_seed(3)
        model(tokens())
        run.log_loss(1.0)
    stored = loopscope.open_run(out)
    return {name: stored.arrow(name).to_pylist() for name in ("router", "residual", "health", "attempt")}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("name", KINDS)
def test_counts_are_those_of_the_experts_inputs(name: str, masked: bool, tmp_path: Path) -> None:
    kind, valid = KINDS[name], VALID if masked else None
    model = Layer(kind.route, **kind.sizes)
    oracle = Oracle(model.moe)
    tables = observed(model, kind.plan(), tmp_path / "run", valid)
    (row,) = tables["router"]
    assert row["expert_count"] == oracle.counts(valid)
    assert not [each for each in tables["health"] if each["severity"] != "info"]
    if not kind.routing.get("dropless", True):
        asked = kind.routing.get("top_k", 2) * int(TOKENS if valid is None else valid.sum())
        assert row["dropped_assignments"] == asked - sum(oracle.counts(valid)) > 0
    elif kind.routing.get("choice") != "expert_choice":
        assert row["dropped_assignments"] is None


def test_margins_are_of_the_scores_that_decided(tmp_path: Path) -> None:
    def margins(name: str) -> tuple[dict[str, Any], Any, Tensor]:
        kind = KINDS[name]
        model = Layer(kind.route, **kind.sizes)
        (row,) = observed(model, kind.plan(), tmp_path / name.replace(" ", "_"))["router"]
        return row, model.moe, model.moe.gate(tokens().reshape(TOKENS, -1)).detach()

    row, moe, logits = margins("bias on logits, sigmoid after the choice")
    top = (logits + moe.bias).topk(3, -1).values
    assert row["margin_mean"] == pytest.approx(float((top[:, 0] - top[:, 1]).mean()), rel=1e-5)
    assert row["selection_gap_mean"] == pytest.approx(float((top[:, 1] - top[:, 2]).mean()), rel=1e-5)
    row, moe, logits = margins("bias before the score")
    top = (logits + moe.bias).topk(3, -1).values
    assert row["margin_mean"] == pytest.approx(float((top[:, 0] - top[:, 1]).mean()), rel=1e-5)
    row, moe, logits = margins("groups by their two best")
    by = (logits.sigmoid() + moe.bias).reshape(TOKENS, 4, 2)
    best = by.sum(-1).topk(2, -1).indices
    top = by.gather(1, best[..., None].expand(-1, -1, 2)).flatten(1).sort(-1, descending=True).values
    assert row["score_space"] == "selection_scores"
    assert row["margin_mean"] == pytest.approx(float((top[:, 0] - top[:, 1]).mean()), rel=1e-5)
    assert row["selection_gap_mean"] == pytest.approx(float((top[:, 1] - top[:, 2]).mean()), rel=1e-5)
    row, *_ = margins("groups that leave no choice")
    assert row["margin_mean"] is not None
    assert row["selection_gap_mean"] is None
    assert "groups of a token hold no more experts" in row["null_reasons"]


UNRANKED = ("margin_mean", "margin_hist", "selection_gap_mean", "selection_gap_hist")
NULLS = {
    "experts choose from the batch": (*UNRANKED[:2], "lb_loss", "dead_expected", "dropped_assignments"),
    "top-p": (*UNRANKED, "dead_expected"),
    "null experts": (*UNRANKED, "dead_expected", "token_entropy_mean", "top1_prob_mean", "z_mean", "lb_loss"),
    "drawn": UNRANKED,
    "by token number": UNRANKED,
    "one-hot with a capacity": ("lb_loss",),
}
THERE = ("maxvio_count", "load_entropy_ratio", "dead_experts", "expert_mass", "mean_prob", "logit_rms")


@pytest.mark.parametrize("name", NULLS)
def test_what_means_nothing_is_null_and_says_why(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    (row,) = observed(Layer(kind.route, **kind.sizes), kind.plan(), tmp_path / "run")["router"]
    for column in NULLS[name]:
        assert row[column] is None, column
        assert f'"{column}":"absent:' in row["null_reasons"], column
    assert all(row[column] is not None for column in THERE)


@pytest.mark.parametrize("combine", [True, False])
def test_soft_routing_is_never_called_balanced(combine: bool, tmp_path: Path) -> None:
    class SoftLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Soft()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.moe(x)["h"]
            return out

    given = {"router_logits": "output.logits"} | ({"combine": "output.combine"} if combine else {})
    kind = Kind(None, given, {"choice": "soft", "top_k": EXPERTS})
    model = SoftLayer()
    tables = observed(model, kind.plan(), tmp_path / "run", VALID)
    (row,) = tables["router"]
    for column in (
        "expert_count",
        "maxvio_count",
        "load_entropy_ratio",
        "dead_experts",
        "lb_loss",
        "margin_mean",
    ):
        assert row[column] is None
        assert f'"{column}":"absent:soft routing' in row["null_reasons"]
    share = model.moe(tokens())["combine"].sum(-1)[VALID].detach()
    assert row["mean_prob"] == pytest.approx(share.mean(0).tolist(), rel=1e-4)
    assert row["expert_mass"] == pytest.approx(share.sum(0).tolist(), rel=1e-4)
    entropy = -(share * share.log()).sum(-1).mean()
    assert row["token_entropy_mean"] == pytest.approx(float(entropy), rel=1e-4)
    proof = loopscope.capture.resolve_adapter("pretrain", "torch")(model, overrides=kind.plan()).plan.notes
    assert bool(proof) != combine


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "bias on the wrong side": ("bias before the score", {"bias_on": "scores"}, {}, "top 2"),
    "bias that is not in the weights": ("biased weights", {"bias_in_weights": False}, {}, "weights"),
    "groups ranked otherwise": ("groups that leave no choice", {"group_score": "sum"}, {}, "top 4"),
    "drops that were not declared": ("one-hot with a capacity", {"dropless": True}, {}, "dropless: false"),
    "a k that was not said to vary": ("top-p", {"variable_k": False}, {}, "variable_k: true"),
    "experts that choose, taken for tokens": (
        "experts choose from the batch", {"choice": "top_k", "variable_k": True}, {}, "top 8",
    ),
    "a drawn choice taken for the top-k": ("drawn", {"choice": "top_k"}, {}, "top 2"),
    "another score function": ("another score function", {"score_func": "sigmoid"}, {}, "top 2|weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_description_is_refused(name: str, tmp_path: Path) -> None:
    kind, routing, tensors, message = WRONG[name]
    model = Layer(KINDS[kind].route, **KINDS[kind].sizes)
    plan = KINDS[kind].plan(**routing)
    plan["moe"]["tensors"] |= tensors
    with pytest.raises(ReconcileError, match=message):
        observed(model, plan, tmp_path / "run")


def test_experts_that_choose_worse_tokens_are_found(tmp_path: Path) -> None:
    right = expert_choice(per_sequence=False)

    def wrong(m: Any, x: Tensor) -> Any:
        runs, gates, handed = right(m, x)
        handed["chosen"] = handed["chosen"].clone()
        handed["chosen"][0, 0] = int((~runs[:, 0]).nonzero()[0])
        return runs, gates, {**handed, "gates": handed["gates"] * 0 + 1}

    kind = KINDS["experts choose from the batch"]
    plan = Kind(wrong, {"router_logits": "output.logits", "token_idx": "output.chosen"}, kind.routing).plan()
    with pytest.raises(ReconcileError, match="not the top"):
        observed(Layer(wrong), plan, tmp_path / "run")


@pytest.fixture
def decoders() -> Iterator[None]:
    before = dict(DECODERS)
    yield
    DECODERS.clear()
    DECODERS.update(before)


def hidden_plan(*, inputs: bool) -> dict[str, Any]:
    tensors = {"router_logits": "output.logits", "topk_idx": "decode.test_choice"}
    plan = Kind(hidden, tensors, {"normalised": False}).plan()
    if inputs:
        plan["moe.experts.*"] = {"tensors": {"expert_input": "input[0]"}, "placements": {}, "merge": "sum"}
    return plan


def choose(call: Call) -> Tensor:
    return call.output["logits"].topk(2, -1).indices


def choose_badly(call: Call) -> Tensor:
    return (-call.output["logits"]).topk(2, -1).indices


@pytest.mark.usefixtures("decoders")
def test_a_recomputed_choice_is_proven_by_the_experts_inputs_or_said_to_be_unproven(tmp_path: Path) -> None:
    decoder("test_choice", recomputes=True)(choose)
    model = Layer(hidden)
    oracle = Oracle(model.moe)
    (row,) = observed(model, hidden_plan(inputs=True), tmp_path / "seen")["router"]
    assert row["expert_count"] == oracle.counts()
    adapter = loopscope.capture.resolve_adapter("pretrain", "torch")
    seen = adapter(model, overrides=hidden_plan(inputs=True))
    assert seen.backend_support().facts()["proof"] == "proven by the experts' inputs"
    assert seen.plan.notes == ()
    unseen = adapter(model, overrides=hidden_plan(inputs=False))
    assert unseen.backend_support().facts()["proof"].startswith("unproven: a decoder")
    assert "unproven" in unseen.plan.notes[0]


@pytest.mark.usefixtures("decoders")
def test_a_recomputed_choice_that_the_experts_contradict_is_refused(tmp_path: Path) -> None:
    decoder("test_choice", recomputes=True)(lambda call: choose(call).roll(1, 0))
    model = Layer(hidden)
    with pytest.raises(ReconcileError, match="not the top 2"):
        observed(model, hidden_plan(inputs=True), tmp_path / "a")
    # Scores and choice both of another tensor: consistent with each other, not with what ran.
    plan = hidden_plan(inputs=True)
    decoder("test_choice", recomputes=True)(choose_badly)
    decoder("test_logits", recomputes=False)(lambda call: -call.output["logits"])
    plan["moe"]["tensors"]["router_logits"] = "decode.test_logits"
    with pytest.raises(ReconcileError, match="number of tokens that the experts were called with"):
        observed(model, plan, tmp_path / "b")


def test_several_routers_of_a_layer_are_blocks_of_their_own(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Mixture(top_k(softmax)), Mixture(top_k(softmax, k=3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x)["h"])["h"]
            return out

    model = Two()
    kind = KINDS["plain"]
    plan = {"first": kind.plan()["moe"], "second": kind.plan(top_k=3)["moe"]}
    oracles = Oracle(model.first), Oracle(model.second)
    rows = observed(model, plan, tmp_path / "run")["router"]
    assert [row["top_k"] for row in rows] == [2, 3]
    assert rows[0]["expert_count"] == oracles[0].counts()
    assert [sum(row["expert_count"]) for row in rows] == [2 * TOKENS, 3 * TOKENS]


@pytest.mark.parametrize(
    ("tensors", "routing", "message"),
    [
        (IDX, {"dropless": False}, "expected dispatch, combine or kept"),
        (IDX, {"choice": "expert_choice", "top_k": EXPERTS}, "expected dispatch, combine or token_idx"),
        (IDX, {"choice": "expert_choice"}, "expected top_k=8"),
        ({**IDX, "kept": "output.kept"}, {}, "expected dropless: false"),
        (
            {"router_logits": "output.logits", "topk_idx": "output.idx"},
            {"weights": "own"},
            "topk_weights or combine",
        ),
        ({"router_logits": "output.logits"}, {}, "without topk_idx"),
        (
            {"router_logits": "output.logits", "dispatch": "output.hot", "topk_weights": "output.best"},
            {},
            "whose order only topk_idx tells",
        ),
    ],
)
def test_a_plan_that_cannot_tell_what_ran_is_refused(
    tensors: dict[str, str], routing: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        loopscope.attach(
            Layer(top_k(softmax)), out=tmp_path / "run", plan=Kind(None, tensors, routing).plan()
        )


def test_what_means_nothing_is_no_capability(tmp_path: Path) -> None:
    kind = KINDS["drawn"]
    model = Layer(kind.route)
    with pytest.raises(PlanError, match="margin_mean is absent: the choice is drawn"):
        loopscope.attach(model, out=tmp_path / "run", plan=kind.plan(), require=["margin_mean"])
    with pytest.raises(PlanError, match="dropped_assignments is absent: the router is dropless"):
        loopscope.attach(
            model, out=tmp_path / "run", plan=kind.plan(), require=["router.dropped_assignments"]
        )
    dropping = KINDS["top 2 with a capacity, kept"]
    loopscope.attach(
        Layer(dropping.route),
        out=tmp_path / "run",
        plan=dropping.plan(),
        require=["router.dropped_assignments"],
    )


@pytest.mark.usefixtures("decoders")
def test_a_decoder_that_does_not_say_whether_it_recomputes_proves_nothing(tmp_path: Path) -> None:
    DECODERS["test_choice"] = lambda module, output: output["logits"].topk(2, -1).indices
    adapter = loopscope.capture.resolve_adapter("pretrain", "torch")(
        Layer(hidden), overrides=hidden_plan(inputs=False)
    )
    assert "nobody said" in adapter.plan.notes[0]
    with pytest.raises(PlanError, match="recomputes is None"):
        decoder("test_choice", recomputes=None)  # type: ignore[arg-type]
