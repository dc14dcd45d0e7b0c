"""A thread that samples a machine every few seconds and hands rows on. Nothing of it reaches the training."""

import json
import logging
import os
import platform
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from loopscope.system.devices import Devices
from loopscope.system.machine import Reading, machine_row, read_machine

_log = logging.getLogger("loopscope.system")
HOST = "host"
"""The device of a machine's own row."""


class SystemSampler:
    """Samples from `start` to `stop`; the first sample is what later ones are measured from.

    Args:
        write: gets each sample's rows.
        every_s: seconds between two samples.
        step: the last step that has ended, asked at each sample.
        folder: whose disk's free space is told.
        psutil: the module, or what looks like it; None takes the one that is installed.
        devices: the accelerators; None looks for them.
    """

    def __init__(
        self,
        write: Callable[[list[dict[str, Any]]], None],
        *,
        every_s: float,
        step: Callable[[], int],
        folder: str,
        psutil: Any = None,
        devices: Devices | None = None,
    ) -> None:
        self._write, self._every_s, self._step, self._folder = write, every_s, step, folder
        self._psutil, self._devices = psutil, devices
        self._before: Reading | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.last_error = ""
        """Why the last sample was not written; text."""

    def start(self) -> bool:
        """Begin; False where psutil is not installed, which the log says."""
        if self._psutil is None:
            try:
                self._psutil = import_module("psutil")
            except ImportError:
                _log.info(
                    "no rows of table system: psutil is not installed (pip install 'loopscope[system]')"
                )
                return False
        self._thread = threading.Thread(target=self._run, name="loopscope-system", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """End the thread and wait for it. A second call does nothing."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:
            thread.join(timeout=10.0)

    def sample(self) -> list[dict[str, Any]]:
        """One row for the machine, and one for each accelerator."""
        if self._devices is None:
            self._devices = Devices()
        reading = read_machine(self._psutil, self._folder)
        found = [(HOST, *machine_row(self._before, reading)), *self._devices.rows()]
        self._before = reading
        shared = {"step": self._step(), "host": platform.node(), "sampled_at": datetime.now(UTC)}
        return [
            {**shared, "device": device, **row, "null_reasons": json.dumps(nulls) if nulls else None}
            for device, row, nulls in found
        ]

    def _run(self) -> None:
        self._before = read_machine(self._psutil, self._folder)
        while not self._stop.wait(self._every_s):
            try:
                self._write(self.sample())
            except Exception as error:  # noqa: BLE001 - a figure of the machine is worth no training
                text = f"{type(error).__name__}: {error}"
                if text != self.last_error:
                    _log.warning("a sample of the machine was not written: %s", text)
                self.last_error = text
