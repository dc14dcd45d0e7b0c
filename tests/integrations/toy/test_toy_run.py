"""The toy run from the command's own class: rows, leaks, bad input."""

from typing import get_args

import pytest
import torch

from loopscope import open_run
from loopscope.cli import main
from loopscope.cli.toy import Kind, Toy
from loopscope.errors import ConfigError, LeakError, RunExistsError
from loopscope.integrations.toy import (
    LEAK_KINDS,
    GuardedCollector,
    ToySettings,
    build_toy_model,
    load_toy_corpus,
    train_toy,
)
from loopscope.trace import ACTIVE_TRACE_SINK, NullCollector


def test_a_clean_run_has_rows_for_every_visit_and_no_leak(tmp_path, capsys):
    out = tmp_path / "a run"
    assert Toy(out=out, steps=5, probe_every=2).run() == 0
    printed = capsys.readouterr().out
    assert "leaks           0" in printed
    # 5 traced steps and probes at 0, 2, 4 and the last, of 8 visits each
    assert "visits checked  72" in printed
    assert printed.splitlines()[-1] == str(out)
    run = open_run(out)
    router = run.arrow("router").to_pylist()
    assert sorted((row["step"], row["unrolled_pos"]) for row in router) == [
        (step, position) for step in range(1, 6) for position in range(8)
    ]
    assert sorted({row["step"] for row in run.arrow("probe_router").to_pylist()}) == [0, 2, 4, 5]
    loss = run.arrow("loss").to_pylist()
    assert [row["step"] for row in loss] == list(range(1, 6))
    assert loss[-1]["task_loss"] < loss[0]["task_loss"]
    assert all(abs(row["closure_error"]) < 1e-5 for row in loss)
    events = {row["event"] for row in run.arrow("health").to_pylist() if row["severity"] != "info"}
    assert events == set()


@pytest.mark.parametrize("kind", LEAK_KINDS)
def test_every_injected_leak_fails_the_run_and_is_named(kind, tmp_path, capsys):
    assert Toy(out=tmp_path / "run", steps=1, probe_every=0, inject_leak=kind).run() == 1
    message = capsys.readouterr().err
    assert "router_logits at unrolled_pos 7" in message
    assert "of 40 trace tensors outlived the callback" in message
    assert not ACTIVE_TRACE_SINK.armed


def test_the_commands_kinds_are_the_injectors():
    assert get_args(Kind) == LEAK_KINDS


def test_the_same_seed_gives_the_same_losses():
    corpus = load_toy_corpus()
    settings = ToySettings(steps=4, is_trace_step=lambda s: s % 2 == 0, is_probe_step=lambda s: s == 3)
    quiet = ToySettings(steps=4, is_trace_step=lambda s: False, is_probe_step=lambda s: False)
    first, second, untouched = (
        train_toy(build_toy_model(corpus), corpus, NullCollector(), each).losses
        for each in (settings, settings, quiet)
    )
    assert first == second == untouched  # neither tracing nor probing shows in the losses


def test_a_leak_in_a_probe_is_seen_there():
    class Hoarder(NullCollector):
        def on_probe_step(self, step, sink, meta, per_token_loss):
            self.kept = sink[2].residual.numpy()
            return {}

    corpus = load_toy_corpus()
    settings = ToySettings(steps=1, is_trace_step=lambda s: False, is_probe_step=lambda s: s == 0)
    with pytest.raises(LeakError, match="residual at unrolled_pos 2"):
        train_toy(build_toy_model(corpus), corpus, Hoarder(), settings)
    assert not ACTIVE_TRACE_SINK.armed


def test_visits_count_as_checked_after_the_backward_only():
    corpus = load_toy_corpus()
    model = build_toy_model(corpus)
    guard = GuardedCollector(NullCollector(), model)
    ACTIVE_TRACE_SINK.arm()
    loss = model(corpus.probe_ids)[0].square().mean()
    guard.on_trace_step(1, ACTIVE_TRACE_SINK.disarm(), model.trace_meta())
    assert guard.visits_checked == 0
    loss.backward()
    del loss
    guard.check_after_backward()
    assert guard.visits_checked == 8


def test_the_corpus_is_the_same_everywhere():
    corpus = load_toy_corpus()
    assert corpus.corpus_hash == load_toy_corpus().corpus_hash
    assert int(corpus.train_ids.max()) < corpus.vocab_size
    batch = corpus.batch(torch.Generator().manual_seed(0), batch_size=3, seq_len=16)
    assert batch.shape == (3, 16)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"steps": 0}, "--steps is 0, expected an integer >= 1"),
        ({"trace_every": -1}, "--trace-every is -1"),
        ({"probe_every": -2}, "--probe-every is -2"),
        ({"inject_leak": "view", "trace_every": 0}, "nothing to leak"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(arguments, names, tmp_path):
    with pytest.raises(ConfigError, match=names):
        Toy(out=tmp_path / "run", **arguments).run()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused(tmp_path, capsys):
    assert Toy(out=tmp_path, steps=1).run() == 0
    with pytest.raises(RunExistsError):
        Toy(out=tmp_path, steps=1).run()
    assert main(["toy", "--steps", "1", "--out", str(tmp_path)]) == 2
    assert "loopscope toy:" in capsys.readouterr().err


def test_an_unknown_kind_of_leak_is_the_wrong_question(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["toy", "--out", str(tmp_path / "run"), "--inject-leak", "nothing"])
    assert caught.value.code == 2
    assert "untyped-storage" in capsys.readouterr().err
