"""Rows of a machine in closed form: what two readings make, what an accelerator says, and what fails of it."""

from __future__ import annotations

import json
import threading
import time
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest

from loopscope.catalog.tables.system import TABLE
from loopscope.system.devices import Devices
from loopscope.system.machine import COUNTERS, Reading, machine_row, read_machine
from loopscope.system.sampler import SystemSampler

Times = namedtuple("Times", ["user", "system", "idle", "iowait", "guest"])


class Machine:
    """What psutil says of a machine of 100 bytes of memory."""

    def __init__(self) -> None:
        self.times = Times(10.0, 5.0, 80.0, 5.0, 1.0)
        self.bytes = 1000
        self.broken: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in object.__getattribute__(self, "__dict__").get("broken", ()):
            raise PermissionError(f"no {name} here")
        return object.__getattribute__(self, name)

    def cpu_times(self) -> Times:
        return self.times

    def getloadavg(self) -> tuple[float, float, float]:
        return (1.5, 1.0, 0.5)

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=100, available=40)

    def Process(self) -> Any:
        return SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=7))

    def disk_usage(self, folder: str) -> Any:
        return SimpleNamespace(free=9)

    def disk_io_counters(self) -> Any:
        return SimpleNamespace(read_bytes=self.bytes, write_bytes=2 * self.bytes)

    def net_io_counters(self, pernic: bool) -> Any:
        card = SimpleNamespace(bytes_recv=3 * self.bytes, bytes_sent=4 * self.bytes)
        return {"lo": SimpleNamespace(bytes_recv=10**9, bytes_sent=10**9), "eth0": card, "ib0": card}


def reading(at: float, busy: tuple[float, float], **counters: int) -> Reading:
    return Reading(at, {}, {**dict.fromkeys(COUNTERS, 0), **counters}, busy)


def test_rates_are_growth_by_time_and_busy_time_by_all_time() -> None:
    row, nulls = machine_row(
        reading(100.0, (50.0, 200.0), disk_read=1000, net_sent=50),
        reading(104.0, (53.0, 216.0), disk_read=5000, net_sent=50),
    )
    assert nulls == {}
    assert row == {
        "interval_s": 4.0, "disk_read": 1000.0, "disk_written": 0.0, "net_received": 0.0, "net_sent": 0.0,
        "cpu_percent": pytest.approx(100 * 3 / 16),
    }  # fmt: skip


def test_a_first_sample_and_a_counter_that_went_back_have_no_rate() -> None:
    row, nulls = machine_row(None, reading(1.0, (1.0, 2.0)))
    assert row == {}
    assert set(nulls) == {*COUNTERS, "cpu_percent", "interval_s"}
    assert set(nulls.values()) == {"absent: first sample"}
    row, nulls = machine_row(reading(1.0, (5.0, 9.0), net_sent=8), reading(2.0, (1.0, 19.0), net_sent=3))
    assert nulls == dict.fromkeys(("net_sent", "cpu_percent"), "absent: the counter went back")
    assert row["disk_read"] == 0.0


def test_what_the_machine_says_becomes_columns() -> None:
    machine = Machine()
    found = read_machine(machine, "/")
    assert found.values == {
        "load_1min": 1.5, "memory_used": 60, "memory_total": 100, "process_memory": 7, "disk_free": 9
    }  # fmt: skip
    # Guest time is in user time already, waiting for a disk is no work, and the loopback is no network.
    assert found.busy == (15.0, 100.0)
    assert found.counters == {"disk_read": 1000, "disk_written": 2000, "net_received": 6000, "net_sent": 8000}
    machine.broken = {"disk_io_counters", "getloadavg", "cpu_times"}
    found = read_machine(machine, "/")
    assert set(found.absent) == {"disk_read", "disk_written", "load_1min", "cpu_percent"}
    row, nulls = machine_row(
        found, Reading(found.at + 1, found.values, found.counters, found.busy, found.absent)
    )
    assert nulls["cpu_percent"] == "absent: PermissionError: no cpu_times here"
    assert (row["net_sent"], "disk_read" in row) == (0.0, False)


class Nvml:
    """One accelerator; what is in `broken` it does not support."""

    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8

    def __init__(self, *broken: str) -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": b"NVIDIA H200", "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5, total=8), "nvmlDeviceGetPowerUsage": 650_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000, "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetCurrentClocksEventReasons": 4,
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            if name in self.broken:
                raise RuntimeError("Not Supported")
            return answers[name]

        return call


def test_an_accelerators_figures() -> None:
    ((device, row, nulls),) = Devices(Nvml()).rows()
    assert (device, nulls) == ("gpu0", {})
    assert row == {
        "device_name": "NVIDIA H200", "gpu_percent": 97.0, "gpu_memory_percent": 41.0, "gpu_memory_used": 5,
        "gpu_memory_total": 8, "power": 650.5, "power_limit": 700.0, "temperature": 61.0, "sm_clock": 1980.0,
        "throttled": "power cap",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "columns"),
    [
        ("nvmlDeviceGetUtilizationRates", {"gpu_percent", "gpu_memory_percent"}),
        ("nvmlDeviceGetMemoryInfo", {"gpu_memory_used", "gpu_memory_total"}),
        ("nvmlDeviceGetPowerUsage", {"power"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit"}),
        ("nvmlDeviceGetTemperature", {"temperature"}),
        ("nvmlDeviceGetClockInfo", {"sm_clock"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"throttled"}),
        ("nvmlDeviceGetName", {"device_name"}),
    ],
)
def test_a_figure_that_a_card_lacks_costs_no_other(call: str, columns: set[str]) -> None:
    ((_, row, nulls),) = Devices(Nvml(call)).rows()
    assert nulls == dict.fromkeys(columns, "absent: NVML: Not Supported")
    assert len(row) + len(nulls) == 10


def test_a_machine_without_a_driver_has_no_accelerators() -> None:
    assert Devices(Nvml("nvmlInit")).rows() == []


def test_a_sample_is_a_row_of_the_table_for_each_device() -> None:
    sampler = SystemSampler(
        lambda rows: None,
        every_s=60.0,
        step=lambda: 12,
        folder="/",
        psutil=Machine(),
        devices=Devices(Nvml()),
    )
    host, card = sampler.sample()
    assert (host["device"], card["device"], host["step"], card["step"]) == ("host", "gpu0", 12, 12)
    assert set(host) | set(card) <= set(TABLE.by_name)
    assert json.loads(host["null_reasons"])["cpu_percent"] == "absent: first sample"
    assert card["null_reasons"] is None
    again, _ = sampler.sample()
    assert again["null_reasons"] is None or "cpu_percent" in json.loads(again["null_reasons"])
    assert again["net_sent"] == 0.0


def test_a_writer_that_fails_ends_nothing_and_the_thread_ends_when_told() -> None:
    tried = threading.Semaphore(0)

    def write(rows: list[dict[str, Any]]) -> None:
        tried.release()
        raise OSError("full")

    sampler = SystemSampler(
        write, every_s=0.01, step=lambda: 0, folder="/", psutil=Machine(), devices=Devices(Nvml("nvmlInit"))
    )
    assert sampler.start()
    for _ in range(3):
        assert tried.acquire(timeout=30)
    sampler.stop()
    sampler.stop()
    before = time.monotonic()
    assert not any(thread.name == "loopscope-system" for thread in threading.enumerate()), before
    assert sampler.last_error == "OSError: full"
