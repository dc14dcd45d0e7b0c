"""NVIDIA's accelerators, through NVML: each figure on its own, so that one that a card lacks costs no other."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_THROTTLE = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal slowdown (software)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal slowdown (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSyncBoost": "sync boost group",
}
"""NVML's constant → in words; an idle card, and one whose clocks were set, are not throttled."""


class Devices:
    """The accelerators of this machine; none where NVML is not there.

    Args:
        nvml: the module `pynvml`, or what looks like it; None takes the one that is installed.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._handles: dict[str, Any] = {}
        try:
            nvml = import_module("pynvml") if nvml is None else nvml
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                self._handles[f"gpu{index}"] = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception:  # noqa: BLE001 - no package, no driver, no right: no accelerator that could be asked
            self._handles.clear()
        self._nvml = nvml

    def rows(self) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
        """(device, columns, why others are null) of each."""
        return [(name, *self._read(handle)) for name, handle in self._handles.items()]

    def _read(self, handle: Any) -> tuple[dict[str, Any], dict[str, str]]:
        nvml = self._nvml
        row: dict[str, Any] = {}
        nulls: dict[str, str] = {}

        def try_to(read: Callable[[], Mapping[str, Any]], *names: str) -> None:
            try:
                row.update(read())
            except Exception as error:  # noqa: BLE001 - "Not Supported", a card that fell off the bus
                nulls.update(dict.fromkeys(names, f"absent: NVML: {error}"))

        def use() -> Mapping[str, Any]:
            found = nvml.nvmlDeviceGetUtilizationRates(handle)
            return {"gpu_percent": float(found.gpu), "gpu_memory_percent": float(found.memory)}

        def memory() -> Mapping[str, Any]:
            found = nvml.nvmlDeviceGetMemoryInfo(handle)
            return {"gpu_memory_used": int(found.used), "gpu_memory_total": int(found.total)}

        def throttled() -> Mapping[str, Any]:
            mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            words = [text for name, text in _THROTTLE.items() if mask & getattr(nvml, name, 0)]
            return {"throttled": ", ".join(words)}

        try_to(lambda: {"device_name": _text(nvml.nvmlDeviceGetName(handle))}, "device_name")
        try_to(use, "gpu_percent", "gpu_memory_percent")
        try_to(memory, "gpu_memory_used", "gpu_memory_total")
        try_to(lambda: {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3}, "power")
        try_to(lambda: {"power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3}, "power_limit")
        try_to(lambda: {"temperature": float(nvml.nvmlDeviceGetTemperature(handle, 0))}, "temperature")
        try_to(lambda: {"sm_clock": float(nvml.nvmlDeviceGetClockInfo(handle, 1))}, "sm_clock")
        try_to(throttled, "throttled")
        return row, nulls


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
