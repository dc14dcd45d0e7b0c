"""After a restart the next deep probe is compared with the one before, or it is said that it cannot be."""

from types import SimpleNamespace

import pytest
import torch

from loopscope.integrations.torchtitan import probing


@pytest.fixture
def probe(monkeypatch):
    events, asked = [], []
    collector = SimpleNamespace(
        writes=True,
        record_event=lambda step, name, severity, **more: events.append((step, name, more["detail"])),
    )
    options = SimpleNamespace(probe_every=3, probe_deep_every=6)
    trainer = SimpleNamespace(
        device="cpu",
        model=None,
        train_context=None,
        session=SimpleNamespace(collector=collector, config=SimpleNamespace(on_error="raise")),
        config=SimpleNamespace(loopscope=options, training=SimpleNamespace(steps=20)),
    )
    monkeypatch.setattr(probing, "chosen_experts", lambda *_, **how: asked.append(how) or {"of": "now"})
    corpus = SimpleNamespace(input_ids=torch.zeros(2, 4, dtype=torch.int64).numpy())
    made = probing.TrainerProbe(trainer, corpus, 2)
    return SimpleNamespace(made=made, options=options, events=events, asked=asked)


def test_a_step_with_a_deep_probe_is_looked_at_again(probe):
    probe.made.restart(12)
    assert probe.made._before == (12, {"of": "now"})
    assert [how["batch_size"] for how in probe.asked] == [2]
    assert probe.events == []


@pytest.mark.parametrize("restored", [9, 10])
def test_a_step_without_one_is_said(probe, restored):
    probe.made.restart(restored)
    assert probe.made._before is None
    assert probe.asked == []
    ((step, name, detail),) = probe.events
    assert (step, name) == (restored + 1, "probe_skipped")
    assert f"there was none at step {restored}" in detail


def test_without_deep_probes_nothing_runs(probe):
    probe.options.probe_deep_every = 0
    probe.made.restart(12)
    assert probe.asked == probe.events == []
