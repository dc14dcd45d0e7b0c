"""What a probe costs in memory as the loop gets deeper: streaming, with a trace that is kept whole, and the deep one.

The deep probe is readouts, margins, perturbations, specialisation, and saturation against a deep probe before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from probe_memory import LiveBytes

from loopscope.models import cpu_compat

cpu_compat.enable()

import torch  # noqa: E402

from loopscope.collect import MemoryWriter, ParquetCollector, ProbeCorpus, RowContext  # noqa: E402
from loopscope.models.loopmoe import FLAVORS, build_config  # noqa: E402
from loopscope.probe import EncodedCorpus  # noqa: E402
from loopscope.probe.deep import DeepSettings, run_deep_probe  # noqa: E402
from loopscope.probe.encode import token_hash  # noqa: E402
from loopscope.trace import run_probe_forward  # noqa: E402

DEPTHS = (4, 16, 64)
BOUND = 1.2
CLOCK = {"elapsed_s", "wall_time"}


class PlainSink(ParquetCollector):
    """The collector without its streaming window."""

    probe_window = None  # type: ignore[assignment]


def debug_model(loop_steps: int, length: int) -> Any:
    """The debug flavour with another number of passes."""
    shape = dataclasses.replace(FLAVORS["debug"], num_loop_steps=loop_steps, max_seq_len=length)
    torch.manual_seed(0)
    model = build_config(shape).build()
    model.init_weights(buffer_device=None)
    return model


def random_ids(documents: int, length: int) -> torch.Tensor:
    """Tokens [D, S]; how much memory is needed does not hang on what they are."""
    size = (documents, length)
    return torch.randint(FLAVORS["debug"].vocab_size, size, generator=torch.Generator().manual_seed(1))


def measure(loop_steps: int, kind: type[ParquetCollector], documents: int, length: int) -> dict[str, Any]:
    """Peak of live tensor bytes during one probe beside the model's own, seconds, and the rows."""
    model, ids = debug_model(loop_steps, length), random_ids(documents, length)
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


def measure_deep(loop_steps: int, documents: int, length: int, together: int) -> dict[str, Any]:
    """The same of a deep probe after an earlier one; also the peak of Python's and NumPy's own memory."""
    model = debug_model(loop_steps, length)
    ids = random_ids(documents, length).numpy()
    corpus = EncodedCorpus(
        name="random",
        input_ids=ids,
        corpus_hash=token_hash(ids),
        strata={"domain": [f"domain {number % 3}" for number in range(documents)]},
        dropped_first_token=False,
    )
    settings = DeepSettings(shuffle_scope="document", num_shuffles=4)
    earlier = run_deep_probe(model, corpus, settings, batch_size=together)
    gc.collect()
    tracemalloc.start()
    began = time.perf_counter()
    with LiveBytes([*model.parameters(), *model.buffers()]) as bytes_seen:
        result = run_deep_probe(model, corpus, settings, batch_size=together, before=(0, earlier.chosen))
    seconds = time.perf_counter() - began
    rows = sum(len(rows) for rows in result.tables.values())
    host = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "peak": bytes_seen.peak,
        "host": host,
        "seconds": seconds,
        "rows": rows,
        "skipped": result.skipped,
    }


def main() -> int:
    """0 where the peaks of the streaming and of the deep probe stay within their bound."""
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
    print("Deep probe, as many documents at once as half of them, MiB")
    print(f"{'R':>4}  {'tensors':>10}  {'Python, NumPy':>13}  {'rows':>9}  {'seconds':>8}")
    for depth in DEPTHS:
        deep = measure_deep(depth, chosen.documents, chosen.length, max(1, chosen.documents // 2))
        print(
            f"{depth:>4}  {deep['peak'] / 2**20:>10.2f}  {deep['host'] / 2**20:>13.2f}  {deep['rows']:>9}  "
            f"{deep['seconds']:>8.2f}",
            flush=True,
        )
        figures[f"deep_tensor_bytes_r{depth}"] = deep["peak"]
        figures[f"deep_host_bytes_r{depth}"] = deep["host"]
        figures[f"deep_peak_bytes_r{depth}"] = deep["peak"] + deep["host"]
        figures[f"deep_s_r{depth}"] = round(deep["seconds"], 3)
    deepest, shallowest = DEPTHS[-1], DEPTHS[0]
    for name in ("streaming", "plain", "deep"):
        ratio = figures[f"{name}_peak_bytes_r{deepest}"] / figures[f"{name}_peak_bytes_r{shallowest}"]
        figures[f"{name}_ratio"] = round(ratio, 4)
    ok = max(figures["streaming_ratio"], figures["deep_ratio"]) <= BOUND and all(
        figures[f"same_rows_r{depth}"] for depth in DEPTHS
    )
    print(
        f"R = {deepest} against R = {shallowest}: streaming {figures['streaming_ratio']:.3f} times (bound {BOUND}), "
        f"deep {figures['deep_ratio']:.3f} times, kept whole {figures['plain_ratio']:.3f} times"
    )
    print(json.dumps(figures))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
