"""The verb `diff`, and the comparison behind it."""

import pytest
from summary_runs import boundary, loss, make_run, probe, router

from loopscope import open_run
from loopscope.analysis.compare import differences, settings_between, window_of
from loopscope.cli import main
from loopscope.store import RunStore


def run_at(path, level, steps=10):
    rows = [loss(s, level + s) for s in range(1, steps + 1)]
    rows += [router(s, pos, level + pos) for s in (5, 10) for pos in range(4)]
    rows += [boundary(10, 1, level), probe(8, "all", "all", level)]
    return make_run(path, rows)


def test_the_last_steps_that_both_have_are_compared(tmp_path):
    a, b = open_run(run_at(tmp_path / "a", 1.0)), open_run(run_at(tmp_path / "b", 2.0, steps=20))
    assert window_of([a, b]) == (9, 10)
    assert window_of([a, b], 1.0) == (1, 10)
    found = {(d.metric, d.place): (d.a, d.b) for d in differences([a], [b], (9, 10), "run")}
    assert found["task_loss", "all steps"] == (10.5, 11.5)
    assert found["loss_mean", "core"] == (1.0, 2.0)


def test_probes_over_other_tokens_are_left_out_with_both_hashes(tmp_path, capsys):
    paths = []
    for name, tokens in (("a", "a" * 64), ("b", "b" * 64)):
        rows = [loss(s, s) for s in range(1, 11)] + [probe(8, "all", "all", 1.0, tokens)]
        paths.append(make_run(tmp_path / name, rows))
    a, b = (open_run(path) for path in paths)
    assert not [d for d in differences([a], [b], (9, 10), "run") if d.table == "probe_loss"]
    assert [d for d in differences([a], [a], (9, 10), "run") if d.table == "probe_loss"]
    assert main(["diff", *map(str, paths)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"corpus_hash {'a' * 64} on one side, {'b' * 64} on the other" in said
    assert "probe_loss.loss_mean" not in said


def test_visits_count_alike_and_head_and_loop_apart(tmp_path):
    a, b = open_run(run_at(tmp_path / "a", 1.0)), open_run(run_at(tmp_path / "b", 3.0))
    found = {
        d.place: (d.a, d.b, d.change)
        for d in differences([a], [b], (1, 10), "block")
        if d.metric == "maxvio_count"
    }
    # loop: positions 1 and 2; the others are the maker's "head"
    assert found == {"head": (2.5, 4.5, 2.0), "loop": (2.5, 4.5, 2.0)}
    steps = {d.place: d.a for d in differences([a], [b], (1, 10), "loop_step") if d.metric == "maxvio_count"}
    assert steps == {"loop step 0": 2.0, "loop step 1": 3.0}


def test_seeds_give_a_spread_and_a_verdict(tmp_path):
    a = [open_run(run_at(tmp_path / f"a{i}", 1.0 + 0.1 * i)) for i in range(3)]
    near = [open_run(run_at(tmp_path / f"n{i}", 1.05 + 0.1 * i)) for i in range(3)]
    far = [open_run(run_at(tmp_path / f"f{i}", 3.0 + 0.1 * i)) for i in range(3)]
    for side, beyond in ((near, False), (far, True)):
        (found,) = [d for d in differences(a, side, (9, 10), "run") if d.metric == "task_loss"]
        assert found.spread_a == pytest.approx(0.1)
        assert found.beyond is beyond
    (found,) = [d for d in differences(a[:1], far, (9, 10), "run") if d.metric == "task_loss"]
    assert (found.spread_a, found.beyond) == (None, None)


def configured(path, configuration):
    with RunStore.create(path, configuration=configuration):
        pass
    return open_run(path)


def test_settings_are_compared_leaf_by_leaf_and_own_paths_are_no_difference(tmp_path):
    def settings(name, lr):
        own = str(tmp_path / name)
        return {
            "loopscope": {"out": own},
            "trainer": {"lr": [{"lr": lr}], "same": 1, "dump": f"{own}/titan", "f": "<f at 0x1>"},
        }

    a, b = (configured(tmp_path / n, settings(n, lr)) for n, lr in (("a", 0.1), ("b", 0.2)))
    assert [(s.name, s.a, s.b) for s in settings_between([a], [b])] == [("trainer.lr[0].lr", "0.1", "0.2")]
    c = configured(tmp_path / "c", {})
    assert ("trainer.same", "1", "(not set)") in [(s.name, s.a, s.b) for s in settings_between([a], [c])]


def test_the_verb_prints_both_parts_and_takes_patterns(tmp_path, capsys):
    for i in range(2):
        run_at(tmp_path / f"a{i}", 1.0 + 0.1 * i)
        run_at(tmp_path / f"b{i}", 5.0 + 0.1 * i)
    assert main(["diff", str(tmp_path / "a*"), str(tmp_path / "b*")]) == 0
    printed = capsys.readouterr().out
    assert "Settings: the same" in printed
    assert "Means over steps 9 to 10" in printed
    assert "± A" in printed
    assert "By loop step" in printed
    assert "*" in next(line for line in printed.splitlines() if line.startswith("loss.task_loss"))


def test_wrong_questions(tmp_path, capsys):
    run = str(run_at(tmp_path / "a", 1.0))
    empty = str(configured(tmp_path / "e", {}).path)
    for arguments, says in (
        ([run, str(tmp_path / "gone")], "is not a run"),
        ([run, str(tmp_path / "gone*")], "no run matches"),
        ([run, run, "--last", "0"], "--last is 0"),
        ([run, empty], "no row of the table loss"),
    ):
        assert main(["diff", *arguments]) == 2
        assert says in capsys.readouterr().err
