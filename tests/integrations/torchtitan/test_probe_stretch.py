"""Probes that take too long come less often, on every rank alike, and the run says so."""

from types import SimpleNamespace

import pytest
from probe_stub import stub_probe

from loopscope.integrations.torchtitan import probing


@pytest.fixture
def probe(monkeypatch):
    clock, ran = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(
        probing.time, "perf_counter", lambda: clock.now
    )  # A probe looks at it when it is made.

    def run_probe_forward(*_, step, **__):
        ran.append(step)
        clock.now += 30.0
        return {"probe/loss": 1.0}

    monkeypatch.setattr(probing, "run_probe_forward", run_probe_forward)
    stub = stub_probe(steps=95, probe_every=10, probe_deep_every=0)
    stub.clock, stub.ran = clock, ran
    return stub


def test_the_period_is_stretched_and_said(probe):
    for step in range(0, 91, 10):
        probe.clock.now += 400.0
        found = probe.made.run(step)
        assert bool(found) == (step in probe.ran)
    probe.made.run(95)
    stretched = [(step, more["value"]) for step, name, more in probe.events if name == "probe_stretched"]
    assert stretched
    assert 10 in probe.ran  # within the first minutes nothing is stretched
    assert len(probe.ran) < 8
    assert probe.ran[-1] == 95  # the last step is always probed


def test_a_cheap_probe_keeps_its_period(probe, monkeypatch):
    monkeypatch.setattr(probing, "run_probe_forward", lambda *_, step, **__: probe.ran.append(step) or {})
    for step in range(0, 91, 10):
        probe.clock.now += 400.0
        probe.made.run(step)
    assert probe.ran == list(range(0, 91, 10))


def test_a_period_that_is_not_reached_is_said(probe, caplog):
    probe.options.probe_every = 500
    with caplog.at_level("WARNING", logger="loopscope.probe"):
        for step in (0, 95):
            probe.made.run(step)
    said = "no probe between: probe_every is 500, the training has 95 steps"
    (found,) = [
        (step, more["detail"]) for step, name, more in probe.events if name == "probe_every_not_reached"
    ]
    assert found == (95, said)
    assert caplog.messages == [f"loopscope: {said}"]


def test_a_period_that_is_reached_is_not(probe):
    for step in range(0, 96, 5):
        probe.made.run(step)
    assert not [name for _, name, _ in probe.events if name == "probe_every_not_reached"]
