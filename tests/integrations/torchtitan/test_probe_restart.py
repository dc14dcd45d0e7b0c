"""After a restart the next deep probe is compared with the one before, or it is said that it cannot be."""

import pytest
from probe_stub import stub_probe

from loopscope.integrations.torchtitan import probing


@pytest.fixture
def probe(monkeypatch):
    stub = stub_probe(steps=20, probe_every=3, probe_deep_every=6)
    stub.asked = []
    monkeypatch.setattr(probing, "chosen_experts", lambda *_, **how: stub.asked.append(how) or {"of": "now"})
    return stub


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
    ((step, name, more),) = probe.events
    assert (step, name) == (restored + 1, "probe_skipped")
    assert f"there was none at step {restored}" in more["detail"]


def test_without_deep_probes_nothing_runs(probe):
    probe.options.probe_deep_every = 0
    probe.made.restart(12)
    assert probe.asked == probe.events == []
