"""Runs scripts on one or more ranks: forks of one process that has imported torch and torchtitan already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_SERVER = Path(__file__).with_name("rank_server.py")


class RankProcesses:
    """The process that ranks are forked from, started when the first are wanted."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, script: Path, *arguments: str, ranks: int, timeout: float = 240) -> tuple[list[int], str]:
        """Run `python SCRIPT ARGUMENTS` on every rank, in this process's environment: (exit statuses, output)."""
        if self._server is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, str(_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=environment,
            )  # fmt: skip
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.NamedTemporaryFile("r", errors="replace") as log:
            order = {
                "script": str(script), "arguments": arguments, "ranks": ranks, "timeout": timeout, "log": log.name,
                "environment": {**os.environ, "OMP_NUM_THREADS": "1"},
            }  # fmt: skip
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            assert answer, "the process that ranks are forked from has ended; expected an answer"
            return json.loads(answer), log.read()

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=60)
