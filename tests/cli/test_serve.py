"""The verb `serve`: where it listens, what it refuses, how it ends."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from summary_runs import loss, make_run

from loopscope.cli import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{root}", "--host", "0.0.0.0"], "--host is 0.0.0.0, which other machines may reach"),
        (["{root}", "--host", "example.org"], "add --allow-remote"),
        (["{root}", "--port", "70000"], "--port is 70000"),
        (["{root}/gone"], "is no folder"),
    ],
)
def test_wrong_questions(tmp_path, capsys, arguments, says):
    assert main(["serve", *(a.format(root=tmp_path) for a in arguments)]) == 2
    assert says in capsys.readouterr().err


def served(root, *flags, token=None):
    environment = {**os.environ, **({"LOOPSCOPE_TOKEN": token} if token else {})}
    command = [sys.executable, "-m", "loopscope.cli", "serve", str(root), "--port", "0", *flags]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_it_prints_its_address_serves_and_ends_cleanly(tmp_path):
    make_run(tmp_path / "run", [loss(1, 2.0)])
    child, address = served(tmp_path)
    try:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address + "api/runs", timeout=60) as answer:
            assert b'"made"' in answer.read()
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        assert child.stderr is not None
        assert "Traceback" not in child.stderr.read()
    finally:
        child.kill()


def test_an_open_address_asks_for_the_token(tmp_path):
    child, address = served(tmp_path, "--host", "0.0.0.0", "--allow-remote", token="a-token")
    try:
        assert address.endswith("/?token=a-token")
        here = address.replace("0.0.0.0", "127.0.0.1").partition("?")[0] + "api/runs"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(here, timeout=60)
        request = urllib.request.Request(here, headers={"Authorization": "Bearer a-token"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
    finally:
        child.kill()
        child.wait(30)
