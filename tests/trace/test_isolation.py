import random
import signal
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn
from trace_helpers import ForeignModel

from loopscope.trace.isolation import isolated_forward


class Messy(nn.Module):
    """Everything that a forward can leave behind."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.BatchNorm1d(3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.arange(4.0))
        self.register_buffer("grown", torch.arange(3.0))
        self.register_buffer("spread", torch.ones(1).expand(4))
        self.register_buffer("absent", None)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.own = torch.Generator().manual_seed(4)
        self.python = random.Random(4)
        self.numpy = np.random.default_rng(4)
        self.calls = 0
        self.cache = None
        self.plain = torch.zeros(2)
        self.frozen.eval()

    def forward(self, x):
        torch.rand(3), random.random(), np.random.rand(3)
        torch.rand(3, generator=self.own), self.python.random(), self.numpy.random(2)
        self.counter += 1
        self.replaced = self.replaced + 1
        self.grown.resize_(5)
        self.spread[0] += 1
        self.absent = torch.ones(1)
        self.passing.fill_(9)
        self.register_buffer("late", torch.ones(1))
        self.calls += 1
        self.cache = torch.ones(3)
        self.plain += 1
        self.norm.running_mean += 1
        return self.norm(x)


def streams(model):
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        model.own.get_state().tolist(),
        model.python.getstate(),
        str(model.numpy.bit_generator.state),
    )


def state(model):
    return {
        "buffers": {name: (id(b), b.tolist()) for name, b in model.named_buffers()},
        "saved": list(model.state_dict()),
        "training": {name: module.training for name, module in model.named_modules()},
        "plain": (model.calls, model.cache, model.plain.tolist(), model.absent),
        "streams": streams(model),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = Messy()
    before = state(model)
    try:
        with isolated_forward(model):
            model(torch.randn(5, 3))
            assert model.calls == 1
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state(model) == before
    assert torch.is_grad_enabled()
    assert not model.frozen.training
    assert model.norm.training


def test_a_training_override_with_side_effects_is_not_run():
    class Folding(nn.Linear):
        folded = 0

        def train(self, mode=True):
            self.folded += 1
            return super().train(mode)

    model = Folding(2, 2)
    with isolated_forward(model):
        model(torch.ones(2))
    assert model.folded == 0
    assert model.training


def test_a_graph_that_saved_a_buffer_stays_valid():
    model = ForeignModel()
    weight = torch.ones(5, requires_grad=True)
    model.tokens.fill_(2.0)
    product = weight * model.tokens  # saves the buffer itself
    with isolated_forward(model):
        model.tokens.data.fill_(7.0)
    product.sum().backward()
    assert weight.grad.tolist() == [2.0] * 5
    assert model.tokens.tolist() == [2.0] * 5


@pytest.mark.parametrize("where", ["instance", "class"])
def test_the_head_is_applied_and_its_switch_put_back(where):
    class Chunked(nn.Module):
        _skip_lm_head = where == "class"

    model = Chunked()
    if where == "instance":
        model._skip_lm_head = True
    with isolated_forward(model):
        assert model._skip_lm_head is False
    assert model._skip_lm_head is True
    assert ("_skip_lm_head" in vars(model)) == (where == "instance")


class FakeAccelerator:
    """Two devices with a generator each."""

    def __init__(self):
        self.states = [torch.tensor([1]), torch.tensor([2])]

    def is_initialized(self):
        return True

    def get_rng_state_all(self):
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states):
        self.states = [state.clone() for state in states]


def test_the_generators_of_every_device_are_put_back(monkeypatch):
    module = FakeAccelerator()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with isolated_forward(nn.Linear(1, 1)):
        for generator in module.states:
            generator += 5
    assert [int(generator) for generator in module.states] == [1, 2]


def test_a_device_that_was_never_used_is_not_initialised(monkeypatch):
    module = FakeAccelerator()
    module.is_initialized = lambda: False
    module.get_rng_state_all = lambda: pytest.fail("initialises the device")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with isolated_forward(nn.Linear(1, 1)):
        pass


def test_dtensors_tracker_is_put_back(monkeypatch):
    holder = pytest.importorskip("torch.distributed.tensor._random")
    tracker = types.SimpleNamespace(
        _use_distribute_region=True, rng_states={"parallel-rng": torch.tensor([1, 2])}
    )
    monkeypatch.setattr(holder, "_rng_tracker", tracker)
    with isolated_forward(nn.Linear(1, 1)):
        tracker._use_distribute_region = False
        tracker.rng_states["parallel-rng"] += 1
        tracker.rng_states["more"] = torch.tensor([0])
        holder._rng_tracker = None
    assert holder._rng_tracker is tracker
    assert tracker._use_distribute_region is True
    assert {name: value.tolist() for name, value in tracker.rng_states.items()} == {"parallel-rng": [1, 2]}


def test_a_tracker_made_by_the_forward_is_forgotten(monkeypatch):
    holder = pytest.importorskip("torch.distributed.tensor._random")
    monkeypatch.setattr(holder, "_rng_tracker", None)
    with isolated_forward(nn.Linear(1, 1)):
        holder._rng_tracker = object()
    assert holder._rng_tracker is None


def test_compiled_blocks_run_eagerly_and_no_graph_is_added():
    import torch._dynamo as dynamo
    from torch._dynamo.testing import CompileCounter

    dynamo.reset()
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0] = torch.compile(model[0], backend=counter, fullgraph=True)
    x = torch.ones(2, 3)
    expected = model(x).detach()
    frames = counter.frame_count
    with isolated_forward(model):
        probed = model(torch.ones(5, 3))
    assert torch.equal(probed[:2], expected)
    assert torch.equal(model(x), expected)
    assert counter.frame_count == frames == 1
    assert all(module.training for module in model.modules())


def test_sharded_blocks_are_resharded(monkeypatch):
    calls = []

    class Sharded(nn.Linear):
        def reshard(self):
            calls.append("reshard")

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", types.SimpleNamespace(FSDPModule=Sharded))
    with isolated_forward(nn.Sequential(Sharded(1, 1), nn.Linear(1, 1))):
        assert calls == []
    assert calls == ["reshard"]


def test_an_interrupt_takes_effect_at_the_end():
    model = Messy()
    before = state(model)
    reached = []
    # Another library of the process may have put its own handler there.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run():
        with isolated_forward(model):
            signal.raise_signal(signal.SIGINT)
            model(torch.randn(5, 3))
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached
    assert state(model) == before
    assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler


def test_whoever_keeps_pressing_is_heard_at_once():
    model = Messy()
    before = state(model)
    reached = []

    def run():
        with isolated_forward(model):
            for _ in range(9):
                signal.raise_signal(signal.SIGINT)
                reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(reached) == 2
    assert state(model) == before


def test_outside_the_main_thread_signals_are_left_alone():
    handler = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with isolated_forward(Messy()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handler]
