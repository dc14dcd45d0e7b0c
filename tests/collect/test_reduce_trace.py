import json
import math
from dataclasses import replace

import pytest
import torch
from collect_helpers import meta, point, sink, specs
from torch import nn
from torch.utils.checkpoint import checkpoint

from loopscope import reduce_trace
from loopscope.errors import MetricInputError, TraceError
from loopscope.trace import ACTIVE_TRACE_SINK, TracePoint


def test_one_row_per_visit_in_order_of_depth():
    tables = reduce_trace(sink(), meta())
    assert [row["unrolled_pos"] for row in tables["router"]] == list(range(8))
    assert [row["unrolled_pos"] for row in tables["residual"]] == list(range(8))
    assert len(tables["transition"]) == 1 + 3 + 4 + 2 + 6 + 1
    assert all(row["num_loop_steps"] == 3 for rows in tables.values() for row in rows)
    assert all(row["num_tokens"] == 10 for rows in tables.values() for row in rows)


def test_coordinates_outside_the_loop_are_null():
    tables = reduce_trace(sink(), meta())
    for row in tables["router"]:
        in_loop = row["block"] == "loop"
        assert (row["loop_step"] is not None) is in_loop
        assert (row["layer_idx"] is not None) is in_loop
    entry = next(row for row in tables["transition"] if row["kind"] == "entry")
    assert (entry["from_loop_step"], entry["from_layer_idx"]) == (None, None)
    assert (entry["to_loop_step"], entry["to_layer_idx"]) == (0, 0)


def test_against_direct_computation():
    window = sink()
    rows = {row["unrolled_pos"]: row for row in reduce_trace(window, meta())["router"]}
    for position, seen in window.items():
        row = rows[position]
        counts = torch.bincount(seen.topk_idx.reshape(-1), minlength=seen.num_experts)
        share = counts.double() / counts.sum()
        mean_prob = seen.router_probs.double().mean(dim=(0, 1))
        z = seen.router_logits.double().logsumexp(-1)
        assert row["expert_count"] == counts.tolist()
        assert row["lb_loss"] == pytest.approx(float(seen.num_experts * (share * mean_prob).sum()), abs=1e-6)
        assert row["maxvio_count"] == pytest.approx(float(seen.num_experts * share.max() - 1), abs=1e-9)
        assert row["z_mean"] == pytest.approx(float(z.mean()), abs=1e-6)
        assert row["z_sq_mean"] == pytest.approx(float((z**2).mean()), abs=1e-5)


def test_transitions_against_direct_computation():
    window = sink()
    tables = reduce_trace(window, meta())
    state = {position: seen.residual.double().reshape(10, -1) for position, seen in window.items()}
    for row in tables["transition"]:
        source, target = state[row["from_pos"]], state[row["to_pos"]]
        delta = (target - source).norm(dim=-1)
        assert row["delta_norm_mean"] == pytest.approx(float(delta.mean()), rel=1e-6)
        growth = target.norm(dim=-1) / source.norm(dim=-1)
        assert row["growth"] == pytest.approx(float(growth.mean()), rel=1e-6)
        if row["kind"] == "from_input":
            assert row["from_pos"] == 0
            assert row["input_distance"] == pytest.approx(float(delta.mean()), rel=1e-6)
        if row["kind"] == "step_boundary":
            same = window[row["from_pos"]].topk_idx.reshape(10, -1, 1)
            same = (same == window[row["to_pos"]].topk_idx.reshape(10, 1, -1)).any(1).sum(1)
            assert row["topk_overlap"] == pytest.approx(float(same.double().mean() / 2))
            assert row["overlap_chance"] == 0.5


def test_update_cosine_uses_the_step_before_at_the_same_layer():
    window = sink()
    rows = [r for r in reduce_trace(window, meta())["transition"] if r["kind"] == "step_boundary"]
    first = [row for row in rows if row["from_loop_step"] == 0]
    assert all(row["update_cosine"] is None for row in first)
    for row in rows:
        if row["from_loop_step"] == 0:
            continue
        older, old, new = (window[row["to_pos"] - 2 * back].residual.double() for back in (2, 1, 0))
        cosine = torch.cosine_similarity(new - old, old - older, dim=-1).mean()
        assert row["update_cosine"] == pytest.approx(float(cosine), rel=1e-5)


def test_padding_counts_nowhere():
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 2:] = False
    window = sink()
    rows = reduce_trace(window, meta(), valid=valid)["router"]
    assert {row["num_tokens"] for row in rows} == {7}
    assert all(sum(row["expert_count"]) == 14 for row in rows)
    for seen in window.values():  # what padding holds must not matter
        seen.residual[1, 2:] = math.nan
        seen.router_logits[1, 2:] = math.inf
    again = reduce_trace(window, meta(), valid=valid)["router"]
    assert again == rows


def test_no_valid_token_is_null_with_a_reason():
    row = reduce_trace(sink(), meta(), valid=torch.zeros(2, 5, dtype=torch.bool))["router"][0]
    assert row["num_tokens"] == 0
    assert row["lb_loss"] is None
    assert json.loads(row["null_reasons"])["lb_loss"].startswith("absent:")


def test_head_and_loop_differ():
    """Case head-and-loop-differ: E belongs to the visit."""
    for loop_experts in (4, 64):
        visits = specs(outer=(8, 2), loop=(loop_experts, 2))
        window = {}
        for spec in visits:
            idx = torch.arange(128).remainder(spec.num_experts).reshape(2, 32, 2)
            window[spec.unrolled_pos] = point(spec, seq=32, idx=idx)
        for row in reduce_trace(window, meta())["router"]:
            assert len(row["expert_count"]) == row["num_experts"]
            assert (row["maxvio_count"], row["dead_experts"]) == (0.0, 0)
            assert row["load_entropy_ratio"] == pytest.approx(1.0)


def test_visits_not_layers():
    """Case visits-not-layers: every visit counts, L = 2 layers at R = 3 are 6 visits."""
    rows = reduce_trace(sink(), meta())["router"]
    balanced = {
        spec.unrolled_pos: point(
            spec,
            seq=8,
            logits=torch.zeros(2, 8, spec.num_experts),
            idx=torch.arange(32).remainder(spec.num_experts).reshape(2, 8, 2),
        )
        for spec in specs()
    }
    rows = reduce_trace(balanced, meta())["router"]
    assert len(rows) == 8
    assert sum(row["lb_loss"] for row in rows) / len(rows) == pytest.approx(1.0)


def test_one_module_many_calls():
    """Case one-module-many-calls: a dense model without a head, h → h + 1, one module called 3 times."""

    class AddOne(nn.Module):
        def forward(self, h):
            return h + 1

    module, h = AddOne(), torch.zeros(1, 4, 1)
    window = ACTIVE_TRACE_SINK.arm()
    for spec in specs(head=0, layers=1, steps=3, tail=0, loop=(0, 0)):
        h = module(h)
        ACTIVE_TRACE_SINK.record(point(spec, residual=h))
    ACTIVE_TRACE_SINK.disarm()
    tables = reduce_trace(window, meta(steps=3, layers=1))
    assert tables["router"] == []
    assert [row["unrolled_pos"] for row in tables["residual"]] == [0, 1, 2]
    assert [row["norm_mean"] for row in tables["residual"]] == [1.0, 2.0, 3.0]
    assert all(row["num_experts"] == 0 for row in tables["residual"])


class _Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, h):
        h = self.second(torch.tanh(self.first(h)))
        return h, self.gate(h)


def _run_routed(block, h, *, recompute, reentrant, early_stop):
    window = ACTIVE_TRACE_SINK.arm()
    try:
        for spec in specs(head=0, layers=1, steps=2, tail=0):
            if not recompute:
                h, logits = block(h)
            elif reentrant:
                h, logits = checkpoint(block, h, use_reentrant=True)
            else:
                h, logits = checkpoint(block, h, use_reentrant=False, early_stop=early_stop)
            ACTIVE_TRACE_SINK.record(point(spec, logits=logits.detach(), residual=h.detach()))
    finally:
        ACTIVE_TRACE_SINK.disarm()
    h.sum().backward()
    return reduce_trace(window, meta(steps=2, layers=1))


@pytest.mark.parametrize(("reentrant", "early_stop"), [(True, True), (False, True), (False, False)])
def test_recompute_counts_once(reentrant, early_stop):
    """Case recompute-counts-twice."""
    torch.manual_seed(0)
    block = _Routed()
    h = torch.randn(2, 5, 6, requires_grad=True)
    plain = _run_routed(block, h, recompute=False, reentrant=reentrant, early_stop=early_stop)
    again = _run_routed(block, h, recompute=True, reentrant=reentrant, early_stop=early_stop)
    assert [row["loop_step"] for row in again["router"]] == [0, 1]
    assert [row["lb_loss"] for row in again["router"]] == [row["lb_loss"] for row in plain["router"]]


def test_probabilities_as_logits_are_refused():
    window = sink()
    seen = window[3]
    fields = {name: getattr(seen, name) for name in seen.__dataclass_fields__}
    window[3] = TracePoint(**{**fields, "router_logits": seen.router_probs})
    with pytest.raises(MetricInputError, match=r"unrolled_pos 3: router_logits hold probabilities"):
        reduce_trace(window, meta())


def test_index_out_of_range_is_refused():
    window = sink()
    window[2].topk_idx[0, 0, 0] = 4
    with pytest.raises(MetricInputError, match="unrolled_pos 2: topk_idx has 1 entries outside"):
        reduce_trace(window, meta())


def test_wrong_shapes_are_refused():
    spec = specs()[0]
    window = sink()
    window[0] = point(replace(spec, num_experts=16), logits=torch.randn(2, 5, 8))
    with pytest.raises(MetricInputError, match=r"router_logits has shape \(2, 5, 8\), expected \(2, 5, 16\)"):
        reduce_trace(window, meta())
    with pytest.raises(MetricInputError, match="valid is"):
        reduce_trace(sink(), meta(), valid=torch.ones(2, 4, dtype=torch.bool))


def test_wrong_meta_and_invalid_window_are_refused():
    with pytest.raises(TraceError, match="loop_axis_provenance is 'reshaped'"):
        reduce_trace(sink(), replace(meta(), loop_axis_provenance="reshaped"))
    window = ACTIVE_TRACE_SINK.arm()
    ACTIVE_TRACE_SINK.record(point(specs()[0]))
    ACTIVE_TRACE_SINK.record(point(specs()[0]))
    ACTIVE_TRACE_SINK.disarm()
    with pytest.raises(TraceError, match="unrolled_pos 0 recorded by"):
        reduce_trace(window, meta())
    with pytest.raises(MetricInputError, match="unrolled_pos 0 at key 5"):
        reduce_trace({5: point(specs()[0])}, meta())


def test_nan_in_the_router_is_null_counted_and_stays_in_its_visit():
    window = sink()
    window[3].router_logits[0, 0, 0] = math.nan
    rows = {row["unrolled_pos"]: row for row in reduce_trace(window, meta())["router"]}
    assert rows[3]["nonfinite_count"] == 1
    assert rows[3]["z_mean"] is None
    assert json.loads(rows[3]["null_reasons"])["z_mean"] == "nonfinite"
    assert sum(rows[3]["expert_count"]) == 20
    assert rows[4]["z_mean"] is not None
