"""Large runs: how long until one metric's curve over training is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from loopscope.store import TABLES, Attempt, RunStore
from loopscope.store.disk import LOCAL_DISK
from loopscope.store.parts.parquet import PartMeta, write_part

EXPERTS = 16
VISITS = 34
RANKS = 64
ROWS_PER_PART = 1_000_000
_SCALARS = ("token_entropy_mean", "maxvio_count", "z_mean")

_QUERY = """
import sys, time
begun = time.perf_counter()
from loopscope.analysis import open_run
imported = time.perf_counter()
run = open_run(sys.argv[1])
opened = time.perf_counter()
query = "select step, avg(token_entropy_mean), count(*) from router where unrolled_pos = 7 group by step order by step"
first = run.sql(query).arrow().read_all()
asked = time.perf_counter()
again = run.sql(query).arrow().read_all()
end = time.perf_counter()
whole = run.sql("select step, avg(token_entropy_mean) from router group by step order by step").arrow().read_all()
last = time.perf_counter()
assert first.num_rows == again.num_rows == whole.num_rows
print(imported - begun, opened - imported, asked - opened, end - asked, last - end, len(first))
"""


def make_run(root: Path, rows: int, *, lists: bool) -> float:
    """A run of `rows` router rows, written as sealed parts. Returns its size in MB."""
    with RunStore.create(root) as store:
        attempt = store.claim_attempt(first_step=1)
    schema = TABLES["router"]
    generator = np.random.default_rng(0)
    for number, start in enumerate(range(0, rows, ROWS_PER_PART), start=1):
        count = min(ROWS_PER_PART, rows - start)
        table = _rows(store.run_id, attempt, start, count, generator, lists=lists)
        meta = PartMeta(
            table="router", schema_version=schema.version, run_id=store.run_id, attempt=1, writer="r0", seq=number,
            parent_attempt=None, first_step=1, world_size=1, loopscope_version="0",
        )  # fmt: skip
        write_part(LOCAL_DISK, root, schema, meta, [table])
    return sum(p.stat().st_size for p in root.rglob("*.parquet")) / 1e6


def _rows(
    run_id: str, attempt: Attempt, start: int, count: int, generator: np.random.Generator, *, lists: bool
) -> pa.Table:
    index = np.arange(start, start + count)
    columns: dict[str, Any] = {
        "run_id": pa.array(np.repeat(run_id, 1)).take(pa.array(np.zeros(count, np.int32))),
        "attempt": np.full(count, attempt.attempt, np.int32),
        "step": index // (VISITS * RANKS),
        "rank": (index // VISITS % RANKS).astype(np.int32),
        "unrolled_pos": (index % VISITS).astype(np.int32),
        "loop_step": (index % VISITS // 2).astype(np.int32),
        **{name: generator.normal(1, 0.1, count) for name in _SCALARS},
    }
    if lists:
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * EXPERTS)
        columns["expert_count"] = _list(offsets, generator.integers(0, 500, count * EXPERTS))
        for name in ("expert_mass", "mean_prob"):
            columns[name] = _list(offsets, generator.random(count * EXPERTS, dtype=np.float32))
        for name in (
            "load_entropy_ratio",
            "effective_experts",
            "load_kl_uniform",
            "margin_mean",
            "z_std",
            "logit_rms",
        ):
            columns[name] = generator.normal(1, 0.1, count)
    schema = TABLES["router"].arrow
    arrays = [
        pa.array(columns[f.name], f.type) if f.name in columns and not isinstance(columns[f.name], pa.Array)
        else columns.get(f.name) if f.name in columns else pa.nulls(count, f.type)
        for f in schema
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=schema)


def _list(offsets: pa.Array, values: np.ndarray[Any, Any]) -> pa.Array:
    kind = pa.int64() if values.dtype.kind == "i" else pa.float32()
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind), type=pa.list_(pa.field("element", kind)))


def measure_scale(folder: Path, scale: float) -> dict[str, dict[str, float]]:
    """10^7 full rows and 10^8 scalar rows, times `scale`."""
    results = {}
    for name, rows, lists in (("full rows", 10**7, True), ("scalar rows", 10**8, False)):
        root = folder / name.replace(" ", "_")
        begun = time.monotonic()
        megabytes = make_run(root, int(rows * scale), lists=lists)
        made = time.monotonic() - begun
        done = subprocess.run(
            [sys.executable, "-c", _QUERY, str(root)], capture_output=True, text=True, check=True
        )
        _, opened, first, again, whole, steps = map(float, done.stdout.split())
        shutil.rmtree(root)
        results[name] = {
            "rows": rows * scale, "megabytes": megabytes, "made_s": made, "open_s": opened, "first_curve_s": first,
            "curve_s": again, "whole_curve_s": whole, "steps": steps,
        }  # fmt: skip
        print(f"{name:<24}" + "  ".join(f"{k} {v:.2f}" for k, v in results[name].items()), flush=True)
    return results
