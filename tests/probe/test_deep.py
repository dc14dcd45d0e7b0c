"""The deep probe: closed forms, what it refuses to report, and that training goes on as if it had not been."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deep_models import EXPERTS, TOP_K, Bare, Identity, LinearLoop, encoded

from loopscope.catalog.tables.keys import RUN_KEYS
from loopscope.errors import ConfigError, MetricInputError, ProbeError, TraceError
from loopscope.metrics.probe import perturbation
from loopscope.models.toy import ToyLoopMoE
from loopscope.probe import deep_perturbation
from loopscope.probe.deep import DeepSettings, chosen_experts, run_deep_probe
from loopscope.store import TABLES
from loopscope.trace import ACTIVE_TRACE_SINK

SETTINGS = DeepSettings(shuffle_scope="batch", num_shuffles=3)
RUN_LEVEL = {column.name for column in RUN_KEYS}


def toy() -> ToyLoopMoE:
    torch.manual_seed(0)
    return ToyLoopMoE(vocab_size=13, width=16)


def deep(model, **how):
    settings = how.pop("settings", SETTINGS)
    corpus = how.pop("corpus", None) or encoded()
    return run_deep_probe(model, corpus, settings, **how)


def test_rows_have_the_columns_of_their_tables_and_no_other():
    first = deep(toy())
    result = deep(toy(), before=(3, first.chosen))
    assert result.skipped == ()
    assert len(result.tables) == 5
    for table, rows in result.tables.items():
        columns = {column.name for column in TABLES[table].columns} - RUN_LEVEL
        assert rows
        written = {name for row in rows for name in row} - {"null_reasons"}
        assert written == columns
        for row in rows:
            nulls = set(json.loads(row["null_reasons"] or "{}"))
            assert nulls <= {name for name, value in row.items() if value is None}
            assert not [v for v in row.values() if isinstance(v, float) and not np.isfinite(v)]


def test_keys_are_unique():
    result = deep(toy(), before=(3, deep(toy()).chosen))
    for table, rows in result.tables.items():
        key = [name for name in TABLES[table].primary_key if name not in RUN_LEVEL]
        found = [tuple(row[name] for name in key) for row in rows]
        assert len(set(found)) == len(found)


def test_the_last_readout_is_the_models_own_prediction():
    model, corpus = toy(), encoded()
    rows = deep(model).tables["probe_readout"]
    ids = torch.from_numpy(corpus.input_ids)
    logits = model.eval()(ids)[0].detach()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert [row["loop_step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["loss_mean"] == pytest.approx(float(expected), rel=1e-5)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert rows[-1]["entropy_mean"] == pytest.approx(float(entropy), rel=1e-5)
    for before, after in pairwise(rows):
        assert after["entropy_change"] == pytest.approx(
            after["entropy_mean"] - before["entropy_mean"], abs=1e-12
        )
        assert after["entropy_change"] != 0
    assert rows[0]["kl_from_previous"] is None
    assert rows[1]["kl_from_previous"] > 0
    assert rows[-1]["argmax_settled"] is None
    head = deep(model, settings=DeepSettings(shuffle_scope="batch", num_shuffles=1, readout="head"))
    assert head.tables["probe_readout"][0]["readout"] == "head"
    assert head.tables["probe_readout"][0]["loss_mean"] != rows[0]["loss_mean"]


def test_a_loop_that_has_converged():
    result = deep(Identity())
    readouts = result.tables["probe_readout"]
    assert [row["kl_from_previous"] for row in readouts[1:]] == [0.0, 0.0, 0.0]
    assert [row["argmax_settled"] for row in readouts[:-1]] == [1.0, 1.0, 1.0]
    assert [row["entropy_change"] for row in readouts[1:]] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("radius", [0.5, 1.0, 1.5])
def test_a_linear_loop_gives_its_spectral_radius(radius):
    rows = deep(LinearLoop(radius)).tables["probe_perturbation"]
    assert rows[0]["distance_rate"] is None  # a single distance has no rate
    for step, row in enumerate(rows):
        assert row["amplification"] == pytest.approx(radius ** (step + 1), rel=1e-3)
        assert row["relative_distance"] == pytest.approx(1e-3, rel=1e-2)
        if step:
            assert row["distance_rate"] == pytest.approx(radius, rel=1e-3)
            assert row["relative_rate"] == pytest.approx(1.0, rel=1e-3)  # h grows as the disturbance does


def test_directions_are_drawn_each_by_itself():
    settings = DeepSettings(shuffle_scope="batch", num_shuffles=1, num_directions=2)
    for row in deep(toy(), settings=settings).tables["probe_perturbation"]:
        low, mean, high = (row[f"relative_distance{end}"] for end in ("_min", "", "_max"))
        assert low < mean < high
        assert mean == pytest.approx((low + high) / 2)


def test_flipped_choices_against_sets(monkeypatch):
    # A disturbance that is large enough to flip some.
    monkeypatch.setattr(
        deep_perturbation, "disturbance", lambda h, draw: perturbation.disturbance(h, draw, epsilon=0.5)
    )
    model = LinearLoop()
    settings = DeepSettings(shuffle_scope="batch", num_shuffles=1, num_directions=1)
    rows = deep(model, settings=settings).tables["probe_perturbation"]
    with torch.no_grad():
        clean = model.embed(torch.from_numpy(encoded().input_ids.copy()))
        moved = clean + perturbation.disturbance(clean, torch.Generator().manual_seed(0), epsilon=0.5)
        for row in rows:
            clean, moved = model.stack(clean), model.stack(moved)
            chosen = [model.gate(h).topk(TOP_K).indices.flatten(0, 1).tolist() for h in (clean, moved)]
            flips = [set(one) != set(other) for one, other in zip(*chosen, strict=True)]
            assert 0 < sum(flips) < len(flips)
            assert row["flipped_share"] == pytest.approx(sum(flips) / len(flips))


def test_forwards_that_differ_by_themselves_report_no_perturbation():
    result = deep(LinearLoop(noise=0.1))
    assert result.tables["probe_perturbation"] == []
    assert result.skipped == ("perturbation: two clean forwards differ",)


def test_a_half_precision_forward_reports_no_perturbation():
    result = deep(LinearLoop().to(torch.bfloat16))
    assert result.tables["probe_perturbation"] == []
    assert "torch.bfloat16, not in float32" in result.skipped[0]
    assert result.tables["probe_readout"]


def test_a_model_with_the_trace_contract_alone():
    result = deep(Bare())
    assert [text.split(":")[0] for text in result.skipped] == ["readout", "perturbation"]
    assert result.tables["probe_readout"] == result.tables["probe_perturbation"] == []
    assert result.tables["probe_margin"]


def test_what_a_deep_probe_chose_can_be_had_again_by_its_first_forwards():
    model, calls = LinearLoop(), []
    whole = deep(model, batch_size=3).chosen
    model.embed.register_forward_hook(lambda *_: calls.append("forward"))
    again = chosen_experts(model, encoded(), batch_size=3)
    assert len(calls) == 2  # of 4 documents
    assert again.keys() == whole.keys() == set(range(4))
    assert all(np.array_equal(again[position], whole[position]) for position in whole)
    assert chosen_experts(model, encoded(), keep=False) == {}


def test_saturation_over_other_tokens_is_refused_with_both_hashes():
    first, other = encoded(), encoded(seed=1)
    with pytest.raises(ProbeError, match=f"{first.corpus_hash} before, {other.corpus_hash} now"):
        deep(LinearLoop(), corpus=other, before=(0, deep(LinearLoop(), corpus=first).chosen))


class ZeroRouter(LinearLoop):
    """A gate that starts at zero, as many do."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.zeros_(self.gate.weight)
        torch.nn.init.zeros_(self.gate.bias)


def test_a_router_that_starts_at_zero_costs_its_ratios_alone():
    result = deep(ZeroRouter(), corpus=encoded(documents=6))
    assert {table for table, rows in result.tables.items() if rows} >= {
        "probe_readout",
        "probe_specialisation",
    }
    for row in result.tables["probe_margin"]:
        assert (row["observed_mean"], row["null_median"]) == (0.0, 0.0)
        nulls = json.loads(row["null_reasons"])
        assert set(nulls) == {"rho", "rho_ref", "rho_cal", "rho_cal_low", "rho_cal_high", "cell"}
        assert set(nulls.values()) == {"nonfinite"}


def test_few_documents_have_no_reading():
    for row in deep(LinearLoop(), corpus=encoded(documents=2)).tables["probe_margin"]:
        assert row["rho_cal"] > 0
        why = "absent:fewer than 5 documents"
        assert json.loads(row["null_reasons"]) == dict.fromkeys(("rho_cal_low", "rho_cal_high", "cell"), why)


def test_a_forward_that_is_not_finite():
    model = LinearLoop()
    with torch.no_grad():
        model.embed.weight[3, 0] = torch.nan
    result = deep(model, corpus=encoded(documents=6))
    assert result.skipped == ("perturbation: the clean forward is not finite",)
    for row in result.tables["probe_readout"][:-1]:
        assert row["argmax_settled"] is None
        assert json.loads(row["null_reasons"])["argmax_settled"] == "nonfinite"
    for row in result.tables["probe_margin"]:
        assert row["cell"] is None
        assert json.loads(row["null_reasons"])["cell"] == "nonfinite"


def test_saturation_of_the_same_parameters_and_of_others():
    first = deep(LinearLoop())
    same = deep(LinearLoop(), before=(0, first.chosen)).tables["probe_saturation"]
    assert [row["saturation"] for row in same] == [1.0] * 4
    other = LinearLoop()
    torch.nn.init.normal_(other.gate.weight)
    changed = deep(other, before=(0, first.chosen)).tables["probe_saturation"]
    assert all(row["saturation"] < 1 for row in changed)
    assert {row["overlap_chance"] for row in changed} == {TOP_K / EXPERTS}
    shorter = deep(LinearLoop(), corpus=encoded(length=6), before=(0, dict(first.chosen)))
    assert shorter.tables["probe_saturation"] == []


@pytest.mark.parametrize("batch_size", [1, 3])
def test_several_forwards_give_the_rows_of_one(batch_size):
    whole, parts = deep(toy()).tables, deep(toy(), batch_size=batch_size).tables
    for table in ("probe_readout", "probe_margin", "probe_specialisation"):
        for one, other in zip(whole[table], parts[table], strict=True):
            for name, value in one.items():
                if isinstance(value, float):
                    assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5)
                else:
                    assert other[name] == value, (table, name)


def test_training_goes_on_as_if_nothing_had_happened():
    def train(probing):
        model = toy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            ids = torch.randint(13, (2, 8))
            logits, lb, _ = model(ids)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * lb
            optimizer.zero_grad()
            loss.backward()
            if probing:
                deep(model, batch_size=2)
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()

    plain, probed = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], probed[0], strict=True))
    assert torch.equal(plain[1], probed[1])


@pytest.mark.parametrize(
    "where",
    [
        "deep_routing.RoutingRecorder.add",
        "deep_spill.SpillFile.put",
        "deep_spill.SpillFile.get",
        "deep_readout.Readouts.add",
    ],
)
def test_an_error_of_ones_own_comes_after_the_last_forward(monkeypatch, where):
    model, calls = LinearLoop(), []
    # Readouts count too: with a sharded model they are forwards that other ranks wait in.
    model.embed.register_forward_hook(lambda *_: calls.append("forward"))
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    deep(model, batch_size=2)
    complete = list(calls)
    calls.clear()

    def fail(*_):
        raise MetricInputError("failed on purpose")

    monkeypatch.setattr(f"loopscope.probe.{where}", fail)
    with pytest.raises(MetricInputError, match="on purpose"):
        deep(model, batch_size=2)
    assert calls == complete
    assert not model.stack._forward_pre_hooks


def test_a_rank_that_writes_nothing_runs_the_same_forwards():
    model, calls = LinearLoop(), []
    model.embed.register_forward_hook(lambda *_: calls.append("forward"))
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    deep(model)
    complete = list(calls)
    calls.clear()
    result = deep(model, keep=False)
    assert calls == complete
    assert result.tables == {}


def test_what_cannot_be_probed():
    with pytest.raises(ProbeError, match="recorded no visit"):
        deep(torch.nn.Embedding(13, 4))
    ACTIVE_TRACE_SINK.arm()
    try:
        with pytest.raises(TraceError, match="armed"):
            deep(LinearLoop())
    finally:
        ACTIVE_TRACE_SINK.disarm()
    for wrong in ({"shuffle_scope": "all"}, {"shuffle_scope": "batch", "num_shuffles": 0}):
        with pytest.raises(ConfigError):
            DeepSettings(**wrong)
