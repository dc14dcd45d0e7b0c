"""cases.json: inputs of public bug reports with their right values; every case is a test here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_models import CheckpointedLoop, balanced, loop_spec, meta, point

import loopscope
from loopscope.errors import MetricInputError
from loopscope.metrics import finish_loss
from loopscope.trace import ACTIVE_TRACE_SINK, TracePoint

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
COVERED = set()


def case(name):
    """The case, noted as covered when the module is imported."""
    COVERED.add(name)
    return pytest.mark.parametrize("given", [CASES[name]], ids=[name])


def reduced(points, *, steps=1, layers=1, valid=None):
    sink = {p.unrolled_pos: p for p in points}
    return loopscope.reduce_trace(sink, meta(steps=steps, layers=layers), valid=valid)


def logits_of(entry):
    return torch.tensor([entry["router_logits"]], dtype=torch.float32)


def one_visit(entry, valid=None):
    logits = logits_of(entry)
    spec = loop_spec(0, experts=logits.shape[-1], k=entry["top_k"])
    return reduced([point(spec, logits)], valid=valid)["router"][0]


def check(row, expected, tolerance=1e-5):
    for name, want in expected.items():
        assert row[name] == pytest.approx(want, abs=tolerance), name


@case("imbalances-cancel")
def test_imbalances_cancel(given):
    points = []
    for layer, entry in enumerate(given["input"]["visits"]):
        logits = logits_of(entry)
        points.append(point(loop_spec(layer, layer=layer, experts=2, k=entry["top_k"]), logits))
    rows = reduced(points, layers=2)["router"]
    for row, expected in zip(rows, given["expect"]["per_visit"], strict=True):
        check(row, expected)
    mean = sum(row["lb_loss"] for row in rows) / len(rows)
    assert mean == pytest.approx(given["expect"]["mean_lb_loss"], abs=1e-5)
    assert abs(mean - given["wrong"]["pooled_lb_loss"]) > 0.5


@case("padding-counted")
def test_padding_counted(given):
    valid = torch.tensor([given["input"]["valid"]])
    check(one_visit(given["input"], valid), given["expect"])
    # The wrong values are what the same tensors give without the mask, so the mask is what makes the difference.
    check(one_visit(given["input"]), given["wrong"])


@case("softmax-twice")
def test_softmax_twice(given):
    check(one_visit(given["input"]), given["expect"])
    twice = {**given["input"], "router_logits": logits_of(given["input"]).softmax(-1)[0].tolist()}
    with pytest.raises(MetricInputError, match="router_logits hold probabilities"):
        one_visit(twice)


CHECKPOINTS = [{"reentrant": True}, *({"reentrant": False, "early_stop": stop} for stop in (True, False))]


@pytest.mark.parametrize("how", CHECKPOINTS, ids=str)
@case("recompute-counts-twice")
def test_recompute_counts_twice(given, how):
    def run(**kwargs):
        torch.manual_seed(0)
        model = CheckpointedLoop(**kwargs)
        h = torch.randn(2, 3, 6, requires_grad=True)
        ACTIVE_TRACE_SINK.arm()
        out = model(h)
        sink = ACTIVE_TRACE_SINK.disarm(on_error="raise")
        out.sum().backward()
        return model, reduced(sink.values(), steps=2)["router"]

    plain_model, plain = run(reentrant=None)
    model, rows = run(**how)
    assert plain_model.forwards == 2
    assert model.forwards == 4, "the case is about a forward that really runs again"
    assert len(rows) == given["expect"]["router_rows"]
    assert [row["loop_step"] for row in rows] == given["expect"]["loop_steps"]
    assert [row["lb_loss"] for row in rows] == [row["lb_loss"] for row in plain]


@case("visits-not-layers")
def test_visits_not_layers(given):
    specs = [loop_spec(0, experts=8, k=2, block="head")]
    for step in range(3):
        specs += [loop_spec(len(specs) + i, step=step, layer=i, experts=4, k=2) for i in range(2)]
    specs.append(loop_spec(len(specs), experts=8, k=2, block="tail"))
    points = [balanced(spec, tokens_per_expert=16 // spec.num_experts) for spec in specs]
    rows = reduced(points, steps=3, layers=2)["router"]
    assert len(rows) == given["expect"]["num_visits"]
    mean = sum(row["lb_loss"] for row in rows) / len(rows)
    assert mean == pytest.approx(given["expect"]["mean_lb_loss"], abs=1e-6)
    assert {row["num_loop_steps"] for row in rows} == {3}


@case("one-module-many-calls")
def test_one_module_many_calls(given):
    class Increment(torch.nn.Module):
        calls = 0

        def forward(self, h):
            h = h + 1
            ACTIVE_TRACE_SINK.record(
                TracePoint(
                    block="loop",
                    unrolled_pos=self.calls,
                    loop_step=self.calls,
                    layer_idx=0,
                    num_experts=0,
                    top_k=0,
                    router_logits=None,
                    router_probs=None,
                    topk_idx=None,
                    topk_weights=None,
                    residual=h.detach(),
                )
            )
            self.calls += 1
            return h

    module, h = Increment(), torch.zeros(1, 2, 1)
    ACTIVE_TRACE_SINK.arm()
    for _ in range(3):
        h = module(h)
    tables = reduced(ACTIVE_TRACE_SINK.disarm(on_error="raise").values(), steps=3)
    assert [row["norm_mean"] for row in tables["residual"]] == given["expect"]["norm_mean"]
    assert [row["unrolled_pos"] for row in tables["residual"]] == given["expect"]["unrolled_pos"]
    assert tables["router"] == []


@case("micro-versus-global")
def test_micro_versus_global(given):
    def visit_with(counts):
        idx = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)]).reshape(1, -1, 1)
        spec = loop_spec(0, experts=len(counts), k=1)
        return point(spec, torch.zeros(1, idx.shape[1], len(counts)), idx=idx)

    counts = [entry["expert_count"] for entry in given["input"]["microbatches"]]
    alone = [reduced([visit_with(c)])["router"][0]["maxvio_count"] for c in counts]
    assert alone == given["expect"]["maxvio_per_microbatch"]

    accumulator = pytest.importorskip("loopscope.collect.accumulate").StepAccumulator()
    from loopscope.collect.rows import step_rows

    for c in counts:
        accumulator.add({0: visit_with(c)})
    row = step_rows(accumulator.finish()).tables["router"][0]
    assert row["maxvio_count"] == given["expect"]["maxvio_merged"]
    assert row["expert_count"] == given["expect"]["expert_count_merged"]
    assert row["maxvio_micro_mean"] == pytest.approx(1.0)
    assert row["num_microbatches"] == 2


@case("z-loss")
def test_z_loss(given):
    check(one_visit(given["input"]), given["expect"])


@case("aux-added-twice")
def test_aux_added_twice(given):
    done = finish_loss(**given["input"])
    assert done.columns["closure_error"] == pytest.approx(
        given["expect"]["closure_error"], abs=given["tolerance"]
    )
    assert done.closure_violated is given["expect"]["health_event"]


@pytest.mark.parametrize("loop_experts", [4, 64])
@case("head-and-loop-differ")
def test_head_and_loop_differ(given, loop_experts):
    specs = [
        loop_spec(0, experts=8, k=2, block="head"),
        loop_spec(1, experts=loop_experts, k=2),
        loop_spec(2, experts=8, k=2, block="tail"),
    ]
    rows = reduced([balanced(spec, tokens_per_expert=64 // spec.num_experts) for spec in specs])["router"]
    assert [row["num_experts"] for row in rows] == [8, loop_experts, 8]
    for row in rows:
        check(row, given["expect"])


def test_every_case_is_a_test():
    assert set(CASES) == COVERED
