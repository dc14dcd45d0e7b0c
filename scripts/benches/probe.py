"""What a probe costs in memory as the loop gets deeper: streaming, and with a trace that is kept whole."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from probe_memory import LiveBytes

from loopscope.models import cpu_compat

cpu_compat.enable()

import torch  # noqa: E402

from loopscope.collect import MemoryWriter, ParquetCollector, ProbeCorpus, RowContext  # noqa: E402
from loopscope.models.loopmoe import FLAVORS, build_config  # noqa: E402
from loopscope.trace import run_probe_forward  # noqa: E402

DEPTHS = (4, 16, 64)
BOUND = 1.2
CLOCK = {"elapsed_s", "wall_time"}


class PlainSink(ParquetCollector):
    """The collector without its streaming window."""

    probe_window = None  # type: ignore[assignment]


def measure(loop_steps: int, kind: type[ParquetCollector], documents: int, length: int) -> dict[str, Any]:
    """Peak of live tensor bytes during one probe beside the model's own, seconds, and the rows."""
    shape = dataclasses.replace(FLAVORS["debug"], num_loop_steps=loop_steps, max_seq_len=length)
    torch.manual_seed(0)
    model = build_config(shape).build()
    model.init_weights(buffer_device=None)
    ids = torch.randint(shape.vocab_size, (documents, length), generator=torch.Generator().manual_seed(1))
    writer = MemoryWriter()
    collector = kind(
        writer,
        context=RowContext(run_id="bench"),
        expected_visits=model.expected_visits(),
        on_error="raise",
        corpus=ProbeCorpus(name="random", hash="0" * 64),
    )
    gc.collect()
    began = time.perf_counter()
    with LiveBytes([*model.parameters(), *model.buffers(), ids]) as bytes_seen:
        run_probe_forward(model, ids, collector=collector, step=0)
    seconds = time.perf_counter() - began
    rows = {
        table: [{name: value for name, value in row.items() if name not in CLOCK} for row in found]
        for table, found in writer.tables.items()
    }
    return {"peak": bytes_seen.peak, "seconds": seconds, "rows": rows}


def main() -> int:
    """0 where the streaming probe's peak stays within its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    chosen = parser.parse_args()
    print("Peak of live tensor bytes during a probe beside the model's own (debug flavour), MiB")
    print(f"{'R':>4}  {'streaming':>10}  {'kept whole':>10}  {'same rows':>9}  {'seconds':>8}")
    figures: dict[str, Any] = {}
    for depth in DEPTHS:
        streaming = measure(depth, ParquetCollector, chosen.documents, chosen.length)
        plain = measure(depth, PlainSink, chosen.documents, chosen.length)
        same = streaming["rows"] == plain["rows"]
        print(
            f"{depth:>4}  {streaming['peak'] / 2**20:>10.2f}  {plain['peak'] / 2**20:>10.2f}  "
            f"{'yes' if same else 'NO':>9}  {streaming['seconds']:>8.2f}",
            flush=True,
        )
        figures[f"streaming_peak_bytes_r{depth}"] = streaming["peak"]
        figures[f"plain_peak_bytes_r{depth}"] = plain["peak"]
        figures[f"same_rows_r{depth}"] = same
        figures[f"streaming_s_r{depth}"] = round(streaming["seconds"], 3)
    deepest, shallowest = DEPTHS[-1], DEPTHS[0]
    for name in ("streaming", "plain"):
        ratio = figures[f"{name}_peak_bytes_r{deepest}"] / figures[f"{name}_peak_bytes_r{shallowest}"]
        figures[f"{name}_ratio"] = round(ratio, 4)
    ok = figures["streaming_ratio"] <= BOUND and all(figures[f"same_rows_r{depth}"] for depth in DEPTHS)
    print(
        f"R = {deepest} against R = {shallowest}: streaming {figures['streaming_ratio']:.3f} times (bound {BOUND}), "
        f"kept whole {figures['plain_ratio']:.3f} times"
    )
    print(json.dumps(figures))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
