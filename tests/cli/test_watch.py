"""The verb `watch`: one look, a live run, an interruption."""

import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from summary_runs import boundary, health, loss, make_run, router

from loopscope import open_run
from loopscope.analysis.liveness import liveness
from loopscope.cli import main
from loopscope.cli.live_view import sparkline, view
from loopscope.store import RunStore


def shown(run, **settings):
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(view(open_run(run), **settings))
    return console.export_text()


def test_one_look_shows_losses_loop_worst_visits_and_alerts(tmp_path):
    rows = [loss(s, 10.0 - s, tokens_seen=s * 100, elapsed_s=s * 0.5) for s in range(1, 9)]
    rows += [
        router(8, 0, 0.5),
        router(8, 1, 3.0),
        boundary(4, 1, 0.5),
        boundary(8, 1, 0.25),
        boundary(8, 2, 0.125),
    ]
    rows += [health(8, "nonfinite", "critical", detail="2 logits")]
    text = shown(make_run(tmp_path / "run", rows))
    assert "made  [finished]  step 8  attempt 1  800 tokens  200 tokens/s" in text
    assert "█▇▆▅▄▃▂▁" in text
    assert "0 → 1" in text
    assert text.index("loop step 0, layer 0") < text.index("head")
    assert "critical: Values are not finite. 1 event at step 8. First: nonfinite: 2 logits" in text


def test_a_run_without_rows_and_markup_in_names(tmp_path):
    with RunStore.create(tmp_path / "run", run_name="[red]a[/red]"):
        pass
    text = shown(tmp_path / "run")
    assert "[red]a[/red]" in text
    assert "no step yet" in text


def test_sparklines():
    assert sparkline([]) == ""
    assert sparkline([None, 1.0]) == " ▁"
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"


def test_whether_a_run_lives(tmp_path):
    store = RunStore.create(tmp_path / "run")
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append("loss", {"step": 1, "aggregation_scope": "global"})
    assert liveness(tmp_path / "run") == "live"
    store.close()
    assert liveness(tmp_path / "run") == "finished"


def test_a_writer_that_was_killed_leaves_a_crashed_run(tmp_path):
    code = (
        "import os, sys; from loopscope.store import RunStore; store = RunStore.create(sys.argv[1]);"
        "w = store.writer(attempt=store.claim_attempt(first_step=1));"
        "w.append('loss', {'step': 1, 'aggregation_scope': 'global'}); w.flush(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert liveness(tmp_path / "run") == "crashed"


def test_in_a_pipe_it_prints_once(tmp_path, capsys):
    run = make_run(tmp_path / "run", [loss(1, 2.0)])
    assert main(["watch", str(run)]) == 0
    assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"), [(["gone"], "is not a run"), (["run", "--every", "0"], "--every is 0")]
)
def test_wrong_questions(tmp_path, capsys, arguments, says):
    make_run(tmp_path / "run", [loss(1, 2.0)])
    assert main(["watch", str(tmp_path / arguments[0]), *arguments[1:]]) == 2
    assert says in capsys.readouterr().err


def test_in_a_terminal_it_follows_the_run_and_quits_cleanly(tmp_path):
    store = RunStore.create(tmp_path / "run")
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append("loss", {"step": 1, "task_loss": 1.0, "aggregation_scope": "global"})
    writer.flush()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "loopscope.cli", "watch", str(tmp_path / "run"), "--every", "0.2"]
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    try:
        _until(ours, "step 1 ")
        writer.append("loss", {"step": 2, "task_loss": 1.0, "aggregation_scope": "global"})
        writer.flush()
        _until(ours, "step 2 ")
        child.send_signal(signal.SIGINT)
        rest = _until(ours, None)
        assert child.wait(60) == 0
        assert "Traceback" not in rest
    finally:
        child.kill()
        os.close(ours)
        store.close()


def _until(terminal, text):
    """What the terminal shows until `text`, or until its end."""
    seen = ""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            piece = os.read(terminal, 65536).decode(errors="replace")
        except OSError:
            return seen
        seen += piece
        if not piece or (text is not None and text in seen):
            return seen
    raise AssertionError(f"{text!r} did not come: {seen[-500:]}")
