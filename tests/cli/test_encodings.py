"""Terminals that know few letters: no command ends for that."""

import os
import subprocess
import sys

import pytest
from store_runs import write_attempt

COMMANDS = (["summary"], ["alerts"], ["verify"])


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_that_cannot_be_encoded_ends_no_command(tmp_path, encoding):
    run = tmp_path / "größe-実験"
    write_attempt(run, range(1, 6))
    code = (
        "import sys; from loopscope.cli import main; "
        f"sys.exit(max(main([*verb, sys.argv[1]]) for verb in {COMMANDS!r}) or main(['metrics']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout
