"""The verb `watch`: one look, a live run, an interruption."""

import io
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from report_runs import Shape, generated_run
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
    assert sparkline([float("nan"), float("-inf")]) == "  "


def test_nan_everywhere_is_shown_and_named(tmp_path):
    # loopscope's own writer refuses NaN; another writer might not.
    nan = pa.array(np.full(40, np.nan))
    shape = Shape(steps=40, changes={"loss": {"task_loss": nan, "grad_norm": nan}})
    text = shown(generated_run(tmp_path / "run", shape))
    assert (
        "critical: Values are not finite. 80 values of the rows, in loss.task_loss, loss.grad_norm." in text
    )


def test_whether_a_run_lives(tmp_path):
    store = RunStore.create(tmp_path / "run")
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append("loss", {"step": 1, "aggregation_scope": "global"})
    assert liveness(tmp_path / "run") == "running"
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


def test_a_narrow_terminal_gets_shorter_lines_and_alerts_come_before_what_may_be_cut_off(tmp_path):
    rows = [loss(s, 10.0 - s) for s in range(1, 9)] + [boundary(s, 1, 0.5) for s in range(1, 9)]
    run = open_run(make_run(tmp_path / "run", rows))
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(view(run, width=40))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 40
    assert text.index("Alerts") < text.index("task_loss")
    # A number that is folded is another number: columns are left out instead.
    assert "0.5000" in text
    # A sparkline is one line: no line of the table is blocks alone.
    assert not [line for line in text.splitlines() if line.strip() and set(line.strip()) <= set("▁▂▃▄▅▆▇█")]


def test_a_name_moves_no_cursor(tmp_path):
    with RunStore.create(tmp_path / "run", run_name="a\x1b[2J\x07b"):
        pass
    out = io.StringIO()
    Console(width=80, file=out, force_terminal=True).print(view(open_run(tmp_path / "run")))
    assert "\x1b[2J" not in out.getvalue()
    assert "a\ufffd[2J\ufffdb" in out.getvalue()


@pytest.mark.parametrize(
    ("end", "terminal"),
    [(signal.SIGINT, "xterm"), (signal.SIGTERM, "xterm"), (signal.SIGHUP, "dumb"), (None, "xterm")],
)
def test_in_a_terminal_it_follows_the_run_and_quits_cleanly(tmp_path, end, terminal):
    store = RunStore.create(tmp_path / "run")
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append("loss", {"step": 1, "task_loss": 1.0, "aggregation_scope": "global"})
    writer.flush()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "loopscope.cli", "watch", str(tmp_path / "run"), "--every", "0.2"]
    child = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "TERM": terminal}
    )
    os.close(theirs)
    try:
        seen = _until(ours, "step 1 ")
        writer.append("loss", {"step": 2, "task_loss": 1.0, "aggregation_scope": "global"})
        writer.flush()
        seen += _until(ours, "step 2 ")
        if end is None:  # The window is closed.
            os.close(ours)
            ours = None
        else:
            child.send_signal(end)
            seen += _until(ours, None)
        assert child.wait(60) == 0
        assert "Traceback" not in seen
        # A cursor that was hidden is shown again; a terminal that knows no such signs gets none.
        assert ("\x1b" in seen) == (terminal != "dumb")
        if end is not None and terminal != "dumb":
            assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l")
    finally:
        child.kill()
        if ours is not None:
            os.close(ours)
        store.close()


def test_a_reader_that_goes_away_is_no_crash(tmp_path):
    run = make_run(tmp_path / "run", [loss(1, 2.0)])
    command = f"{sys.executable} -m loopscope.cli watch {run} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode in (0, 1)
    assert ended.stderr == ""


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
