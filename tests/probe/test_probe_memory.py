"""A probe's peak memory does not grow with the number of loop steps, beyond a little."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from loopscope.collect import MemoryWriter, ParquetCollector, ProbeCorpus, RowContext
from loopscope.models.toy import ToyLoopMoE
from loopscope.probe import EncodedCorpus
from loopscope.probe.deep import DeepSettings, run_deep_probe
from loopscope.trace import run_probe_forward

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benches" / "lib"))

from probe_memory import LiveBytes


class _PlainSink(ParquetCollector):
    probe_window = None


class _Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.trace_meta = model, model.trace_meta

    def forward(self, ids):
        return self.model(ids)[0]


def peak(kind, loop_steps: int) -> int:
    torch.manual_seed(0)
    model = ToyLoopMoE(vocab_size=512, width=32, num_stacks=loop_steps, num_experts=16)
    ids = torch.randint(512, (4, 64))
    collector = kind(
        MemoryWriter(),
        context=RowContext(run_id="r"),
        expected_visits=model.expected_visits(),
        on_error="raise",
        corpus=ProbeCorpus(name="c", hash="h"),
    )
    with LiveBytes([*model.parameters(), ids]) as found:
        run_probe_forward(_Logits(model), ids, collector=collector, step=0)
    return found.peak


def test_streaming_stays_within_its_bound_and_keeping_does_not():
    assert peak(ParquetCollector, 24) <= 1.2 * peak(ParquetCollector, 4)
    assert peak(_PlainSink, 24) > 1.5 * peak(_PlainSink, 4)


def deep_peak(loop_steps: int) -> int:
    torch.manual_seed(0)
    model = ToyLoopMoE(vocab_size=256, width=32, num_stacks=loop_steps, num_experts=16)
    ids = torch.randint(256, (4, 48)).numpy()
    corpus = EncodedCorpus(
        name="c",
        input_ids=ids,
        corpus_hash="h",
        strata={"domain": ["a", "b", "a", "b"]},
        dropped_first_token=False,
    )
    settings = DeepSettings(shuffle_scope="batch", num_shuffles=2)
    before = run_deep_probe(model, corpus, settings, batch_size=2).chosen
    with LiveBytes([*model.parameters()]) as found:
        result = run_deep_probe(model, corpus, settings, batch_size=2, before=(0, before))
    assert all(result.tables.values())
    return found.peak


def test_the_deep_probe_stays_within_the_same_bound():
    assert deep_peak(24) <= 1.2 * deep_peak(4)


def test_what_the_count_counts():
    with LiveBytes([]) as found:
        first = torch.zeros(1000)
        view = first[:10]
        second = first + 1
        del first
        assert found.live == 8000  # the view keeps its storage
        del view, second
    assert found.peak == pytest.approx(8000)
    assert found.live == 0
