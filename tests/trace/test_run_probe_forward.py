import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trace_helpers import META, B, D, E, ForeignModel, K, S, SeenProbe, V, ids

from loopscope.errors import ProbeError, TraceError
from loopscope.trace import ACTIVE_TRACE_SINK, NullCollector, TraceMeta, run_probe_forward
from loopscope.trace.probe import raised_in_probe_forward


def probe(model, tokens=None, **arguments):
    seen = arguments.pop("collector", None) or SeenProbe()
    found = run_probe_forward(
        model, ids() if tokens is None else tokens, collector=seen, step=arguments.pop("step", 7), **arguments
    )
    return seen, found


def test_the_collector_hears_one_forward_in_eval_without_gradients():
    model = ForeignModel(dropout=0.5)
    seen, found = probe(model)
    assert seen.calls == [7]
    assert seen.meta == model.trace_meta()
    assert sorted(seen.tensors) == [0, 1]
    assert seen.tensors[1]["router_logits"].shape == (B, S, E)
    assert found == {"probe/loss": float(seen.loss.sum())}
    again, _ = probe(model)
    assert torch.equal(again.loss, seen.loss)  # dropout was off
    assert model.training
    assert not ACTIVE_TRACE_SINK.armed


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 99))
def test_the_loss_is_an_explicit_shift_with_a_last_position_of_zero(batch, length, seed):
    torch.manual_seed(seed)
    model, tokens = ForeignModel(), ids(batch, length, seed)
    seen, _ = probe(model, tokens)
    logits = model.eval()(tokens).detach().double().numpy()
    expected = np.zeros((batch, length))
    for b in range(batch):
        for s in range(length - 1):
            row = logits[b, s]
            expected[b, s] = np.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens[b, s + 1]]
    assert seen.loss.dtype == torch.float32
    assert torch.equal(seen.loss[:, -1], torch.zeros(batch))
    np.testing.assert_allclose(seen.loss.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_logits_are_reduced_in_float32():
    model = ForeignModel().to(torch.bfloat16)
    seen, _ = probe(model)
    logits = model.eval()(ids()).detach().float()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten(), reduction="none")
    assert torch.equal(seen.loss[:, :-1].flatten(), expected)


class WithTuple(ForeignModel):
    def forward(self, tokens):
        return super().forward(tokens), torch.zeros(()), None


def test_a_tuple_that_starts_with_logits_is_accepted():
    torch.manual_seed(0)
    plain = ForeignModel()
    tuples = WithTuple()
    tuples.load_state_dict(plain.state_dict())
    assert torch.equal(probe(plain)[0].loss, probe(tuples)[0].loss)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 100])
def test_several_forwards_give_one_call_with_points_joined_along_the_batch(batch_size):
    model = ForeignModel()
    whole, _ = probe(model)
    parts, _ = probe(model, batch_size=batch_size)
    assert parts.calls == [7]
    assert torch.allclose(parts.loss, whole.loss, atol=1e-6)
    assert parts.tensors.keys() == whole.tensors.keys()
    for position, fields in whole.tensors.items():
        assert parts.tensors[position].keys() == fields.keys()
        for name, tensor in fields.items():
            assert torch.allclose(parts.tensors[position][name].double(), tensor.double(), atol=1e-6), name


class Twice(ForeignModel):
    def forward(self, tokens):
        super().forward(tokens)
        return super().forward(tokens)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_visit_recorded_twice_reaches_the_collector_as_a_fault(batch_size):
    seen, _ = probe(Twice(), batch_size=batch_size)
    assert len(seen.faults) == 2
    assert "unrolled_pos 0 recorded by loop" in seen.faults[0]


class Restless(ForeignModel):
    def forward(self, tokens):
        self.loops = 1 + len(tokens) % 2
        return super().forward(tokens)


def test_visits_that_differ_between_forwards_are_refused():
    with pytest.raises(ProbeError, match="unrolled_pos 1 was recorded for some documents"):
        probe(Restless(), ids(3), batch_size=2)


# -- training goes on as if nothing had happened ------------------------------------------------------------


class CountsInEval(ForeignModel):
    """Counts, replaces a buffer, draws from every stream, keeps a submodule in eval."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.frozen = nn.Dropout(0.5)
        self.frozen.eval()
        self.register_buffer("running", torch.zeros(3))

    def forward(self, tokens):
        self.tokens += 1
        self.running = self.running + torch.rand(3)
        random.random()
        np.random.rand()
        torch.rand(2)
        return super().forward(tokens) + self.running.sum()


def train(probe_at=(), steps=6, **arguments):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = CountsInEval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        tokens = torch.randint(V, (B, S)) + random.randint(0, 0)
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in probe_at:
            probe(model, step=step, **arguments)
    final = {name: value.clone() for name, value in model.state_dict().items()}
    # Python's own stream is compared in test_isolation: beartype, which checks these calls, draws from it.
    streams = (torch.get_rng_state(), np.random.get_state()[1].tolist())
    flags = {name: module.training for name, module in model.named_modules()}
    return losses, final, optimizer.state_dict(), streams, flags


def assert_same(first, second):
    assert first[0] == second[0]
    for name, value in first[1].items():
        assert torch.equal(value, second[1][name]), name
    for one, other in zip(first[2]["state"].values(), second[2]["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert torch.equal(first[3][0], second[3][0])
    assert first[3][1:] == second[3][1:]
    assert first[4] == second[4]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_run_with_probes_equals_the_run_without_bit_for_bit(batch_size):
    plain = train()
    assert_same(plain, train(probe_at=(2, 3, 6), batch_size=batch_size))
    assert plain[4]["frozen"] is False


class Raising(NullCollector):
    def on_probe_step(self, step, sink, meta, per_token_loss):
        torch.rand(1)
        raise ValueError("the collector failed")


def test_also_when_the_collector_raises():
    torch.manual_seed(0)
    model = CountsInEval()
    state, stream = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(ValueError, match="the collector failed") as caught:
        probe(model, collector=Raising())
    assert not raised_in_probe_forward(caught.value)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(stream, torch.get_rng_state())
    assert model.training
    assert not model.frozen.training
    assert not ACTIVE_TRACE_SINK.armed


class FailsAt(ForeignModel):
    calls = 0

    def __init__(self, at):
        super().__init__()
        self.at = at

    def forward(self, tokens):
        type(self).calls += 1
        out = super().forward(tokens)
        if type(self).calls == self.at:
            raise ArithmeticError("the model failed")
        return out


def test_what_fails_in_the_models_forward_is_raised_at_once_and_marked():
    FailsAt.calls = 0
    with pytest.raises(ArithmeticError) as caught:
        probe(FailsAt(2), batch_size=1)
    assert FailsAt.calls == 2
    assert raised_in_probe_forward(caught.value)
    assert "loopscope probe" in caught.value.__notes__[0]
    assert not ACTIVE_TRACE_SINK.armed


class HiddenOnce(FailsAt):
    """Returns hidden states in its first forward only: loopscope's own check fails there."""

    def forward(self, tokens):
        out = super().forward(tokens)
        return out[..., :D] if type(self).calls == 1 else out


def test_what_fails_in_our_own_code_is_raised_after_the_last_forward():
    HiddenOnce.calls = 0
    seen = SeenProbe()
    with pytest.raises(ProbeError, match="hidden states"):
        probe(HiddenOnce(-1), batch_size=1, collector=seen)
    assert HiddenOnce.calls == B  # every forward ran, so that no other rank waits in one
    assert seen.calls == []


def test_every_forward_runs_inside_the_callers_context():
    inside = []

    @contextmanager
    def context():
        inside.append("enter")
        yield
        inside.append("exit")

    class Asks(SeenProbe):
        def on_probe_step(self, *arguments):
            inside.append("collector")
            return super().on_probe_step(*arguments)

    probe(ForeignModel(), context=context, batch_size=2, collector=Asks())
    assert inside == ["enter", "exit", "enter", "exit", "collector"]


# -- refused -------------------------------------------------------------------------------------------------


def test_an_armed_sink_is_an_error_and_stays_armed():
    window = ACTIVE_TRACE_SINK.arm()
    model = ForeignModel()
    model(ids())
    with pytest.raises(TraceError, match="while the trace sink is armed"):
        probe(model)
    assert ACTIVE_TRACE_SINK.disarm() is window
    assert len(window) == 2


class Hidden(ForeignModel):
    _skip_lm_head = False

    def __init__(self, skip):
        super().__init__()
        self._skip_lm_head = skip
        self.hide = not skip

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits[..., :D] if self.hide or self._skip_lm_head else logits


def test_hidden_states_are_refused():
    with pytest.raises(
        ProbeError, match=r"the last dimension of the model's output is 8.*expected the vocab"
    ):
        probe(Hidden(skip=False))


def test_a_model_that_skips_its_head_is_asked_for_logits():
    model = Hidden(skip=True)
    seen, _ = probe(model)
    assert seen.loss.shape == (B, S)
    assert model._skip_lm_head is True


class Nameless(nn.Module):
    """Names no vocabulary anywhere and returns its residual."""

    def __init__(self, body):
        super().__init__()
        self.body = [body]

    def forward(self, tokens):
        return self.body[0](tokens)[..., :D]


def test_hidden_states_are_refused_where_no_vocabulary_is_named():
    with pytest.raises(ProbeError, match="names no vocabulary"):
        probe(Nameless(ForeignModel()), meta=META)


class Silent(ForeignModel):
    def forward(self, tokens):
        return self.out(self.emb(tokens))


@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        (torch.zeros(2, 1, dtype=torch.int64), r"shape \[2, 1\], expected \[B, S\]"),
        (torch.zeros(4, dtype=torch.int64), r"shape \[4\]"),
        (torch.zeros(0, 4, dtype=torch.int64), r"shape \[0, 4\]"),
        (torch.zeros(2, 4), "dtype torch.float32"),
        (torch.full((2, 4), V), "holds ids from 11 to 11, expected 0 <= id < 11"),
        (torch.full((2, 4), -1), "holds ids from -1"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_before_anything_runs(tokens, names):
    with pytest.raises(ProbeError, match=names):
        probe(ForeignModel(), tokens)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_size_below_one_is_refused(batch_size):
    with pytest.raises(ProbeError, match=f"batch_size is {batch_size}"):
        probe(ForeignModel(), batch_size=batch_size)


def test_a_model_without_the_contract_is_refused():
    with pytest.raises(ProbeError, match="recorded no visit"):
        probe(Silent())
    with pytest.raises(ProbeError, match=r"has no trace_meta\(\) and no meta was given"):
        probe(nn.Linear(1, 1))


def test_a_meta_that_breaks_the_contract_is_refused():
    wrong = TraceMeta(
        num_stacks=1, num_layers_in_stack=1, num_experts=E, num_active=K, loop_axis_provenance="guess"
    )
    with pytest.raises(TraceError, match="'guess'"):
        probe(ForeignModel(), meta=wrong)
