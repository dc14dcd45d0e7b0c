"""A headless Chromium, driven over its debugging pipe: no port, no further package."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


def find() -> str | None:
    """The program, where it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab. Evaluates JavaScript, collects dialogs, failed requests and errors of the page."""

    def __init__(self, program: str, *, width: int = 1280, height: int = 900) -> None:
        self._folder = tempfile.mkdtemp(prefix="browser-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4, whatever they are here.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = [
            program,
            *FLAGS,
            f"--user-data-dir={self._folder}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        self._child = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.wait(30)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, address: str) -> None:
        self._send("Page.navigate", url=address)

    def value(self, script: str) -> Any:
        """What an expression is in the page."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 90) -> float:
        """Wait until an expression is true; the seconds that took."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if self.value(script) is True:
                return time.monotonic() - begun
            time.sleep(0.05)
        shown = self.value("document.body.innerText")[:500]
        raise AssertionError(f"not true within {seconds} s: {script}; errors {self.errors}; page {shown}")

    def _send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError("the browser is gone")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        name, given = event.get("method"), event.get("params", {})
        if name == "Page.javascriptDialogOpening":
            self.dialogs.append(given["message"])
        elif name == "Runtime.exceptionThrown":
            self.errors.append(
                str(given["exceptionDetails"].get("exception", given["exceptionDetails"]))[:500]
            )
        elif name == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
