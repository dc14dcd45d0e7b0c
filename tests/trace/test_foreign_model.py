"""A model that is not ours: plain PyTorch with a loop, which uses the contract and gets rows."""

import pytest
import torch
from trace_helpers import B, E, ForeignModel, K, S, ids

from loopscope import ParquetCollector, reduce_trace
from loopscope.collect import MemoryWriter, ProbeCorpus, RowContext
from loopscope.trace import ACTIVE_TRACE_SINK, assert_trace_released, run_probe_forward


def test_it_gets_a_row_per_visit():
    torch.manual_seed(0)
    model = ForeignModel(loops=3)
    ACTIVE_TRACE_SINK.arm()
    model(ids())
    sink = ACTIVE_TRACE_SINK.disarm(on_error="raise")
    rows = reduce_trace(sink, model.trace_meta())
    assert [row["unrolled_pos"] for row in rows["router"]] == [0, 1, 2]
    for row in rows["router"]:
        counts = torch.bincount(sink[row["unrolled_pos"]].topk_idx.flatten(), minlength=E)
        assert row["expert_count"] == counts.tolist()
        assert sum(row["expert_count"]) == B * S * K
        assert (row["num_experts"], row["top_k"], row["num_loop_steps"]) == (E, K, 3)
    boundary = [row for row in rows["transition"] if row["kind"] == "step_boundary"]
    assert [(row["from_loop_step"], row["to_loop_step"]) for row in boundary] == [(0, 1), (1, 2)]
    h0, h1 = sink[0].residual, sink[1].residual
    expected = ((h1 - h0).norm(dim=-1) / h0.norm(dim=-1)).mean().item()
    assert boundary[0]["relative_delta"] == pytest.approx(expected, rel=1e-5)
    del h0, h1
    assert_trace_released(sink, model=model)


def test_its_probe_gets_rows():
    model, writer = ForeignModel(loops=2), MemoryWriter()
    collector = ParquetCollector(
        writer,
        context=RowContext(run_id="run"),
        expected_visits=(),
        on_error="raise",
        corpus=ProbeCorpus(name="four", hash="f00", strata={"domain": ["a", "a", "b", "b"]}),
    )
    found = run_probe_forward(model, ids(), collector=collector, step=0)
    assert [row["unrolled_pos"] for row in writer.rows("probe_router")] == [0, 1]
    strata = {(row["stratum_kind"], row["stratum"]): row for row in writer.rows("probe_loss")}
    assert set(strata) == {("all", "all"), ("domain", "a"), ("domain", "b")}
    assert strata["all", "all"]["num_target_tokens"] == B * (S - 1)
    assert found["probe/loss"] > 0
