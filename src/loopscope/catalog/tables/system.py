"""`system`: what the machines did meanwhile, so that a slow step has a cause."""

from functools import partial

from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import RUN_KEYS

_text = partial(Column, type="string")
_bytes = partial(Column, type="int64", unit="bytes")
_FIRST = "first sample of an attempt, a counter that went back: absent"
_rate = partial(Column, unit="bytes/s", null_rule=_FIRST)
_HOST = "rows of a device: not_applicable; not told by the system: absent"
_DEVICE = "rows of a host: not_applicable; not told by NVML: absent"
_host = partial(_bytes, null_rule=_HOST)
_gpu = partial(Column, null_rule=_DEVICE)

TABLE = TableSpec(
    name="system",
    doc="A machine's own figures, and its accelerators', every few seconds; step is the last one that had ended.",
    progress=False,
    primary_key=("run_id", "attempt", "host", "device", "sampled_at"),
    columns=(
        *RUN_KEYS,
        _text(name="host", formula="name of the machine", required=True),
        _text(name="device", formula="host, or an accelerator: gpu0, gpu1, ...", required=True),
        Column(
            name="sampled_at", type="timestamp[us, UTC]", formula="when, on the wall clock", required=True
        ),
        Column(
            name="interval_s",
            formula="since the sample before, on a monotonic clock",
            unit="s",
            null_rule=_FIRST,
        ),
        Column(name="cpu_percent", formula="busy time of all cores / their time", unit="%", null_rule=_FIRST),
        Column(name="load_1min", formula="processes that run or wait, over the last minute", null_rule=_HOST),
        _host(name="memory_used", formula="total − available"),
        _host(name="memory_total", formula="main memory of the machine"),
        _host(name="process_memory", formula="resident memory of the process that samples"),
        _rate(name="disk_read", formula="read from all disks"),
        _rate(name="disk_written", formula="written to all disks"),
        _host(name="disk_free", formula="free for this user on the disk of the run"),
        _rate(name="net_received", formula="received over all interfaces but loopback"),
        _rate(name="net_sent", formula="sent over all interfaces but loopback"),
        _text(name="device_name", formula="model of the accelerator", null_rule=_DEVICE),
        _gpu(name="gpu_percent", formula="time in which a kernel ran / time, as NVML samples it", unit="%"),
        _gpu(
            name="gpu_memory_percent", formula="time in which its memory was read or written / time", unit="%"
        ),
        _bytes(name="gpu_memory_used", formula="memory taken on the accelerator", null_rule=_DEVICE),
        _bytes(name="gpu_memory_total", formula="memory of the accelerator", null_rule=_DEVICE),
        _gpu(name="power", formula="drawn by the accelerator", unit="W"),
        _gpu(name="power_limit", formula="what it may draw", unit="W"),
        _gpu(name="temperature", formula="of the accelerator", unit="°C"),
        _gpu(name="sm_clock", formula="clock of its processors", unit="MHz"),
        _text(name="throttled", formula="why its clock is held down; empty: it is not", null_rule=_DEVICE),
    ),
)
