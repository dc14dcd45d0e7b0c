"""Runs made of generated rows, as large as asked for, in sealed parts; and the sicknesses that a report must name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from probe_rows import keys, probe_tables

from loopscope.store import TABLES, RunStore
from loopscope.store.disk import LOCAL_DISK
from loopscope.store.parts.parquet import PartMeta, write_part


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A looped model and its schedule: `loops` × `layers` visits between one head and one tail."""

    steps: int = 300
    every: int = 5
    loops: int = 4
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    tokens: int = 4096
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Table → column → value(s) that replace the healthy ones."""


def generated_run(path: Path, shape: Shape | None = None, *, name: str = "generated", seed: int = 0) -> Path:
    """A run that looks healthy but for `shape.changes`."""
    shape = shape or Shape()
    loop = [("loop", r, layer) for r in range(shape.loops) for layer in range(shape.layers)]
    visits = [("head", None, None), *loop, ("tail", None, None)]
    expected = [
        {
            "block": b, "unrolled_pos": i, "loop_step": r or 0, "layer_idx": layer or 0, "num_experts": shape.experts,
            "top_k": shape.top_k,
        }
        for i, (b, r, layer) in enumerate(visits)
    ]  # fmt: skip
    meta = {"num_stacks": shape.loops, "num_layers_in_stack": shape.layers}
    with RunStore.create(path, run_name=name, expected_visits=expected, trace_meta=meta) as store:
        store.claim_attempt(first_step=1)
    generator = np.random.default_rng(seed)
    traced = np.arange(shape.every, shape.steps + 1, shape.every)
    tables = {
        "loss": _loss(shape, generator),
        "router": _router(shape, traced, visits, generator),
        "residual": _residual(shape, traced, visits, generator),
        "transition": _transition(shape, traced, generator),
        "health": _health(traced, len(visits)),
        "system": _system(traced),
        **probe_tables(shape, visits, np.random.default_rng([seed, 1])),
    }
    for table, columns in tables.items():
        columns = {**columns, **shape.changes.get(table, {})}
        _write(path, store.run_id, table, columns)
    return path


def _write(root: Path, run_id: str, table: str, columns: Mapping[str, Any]) -> None:
    schema = TABLES[table]
    rows = len(columns["step"])
    shared = {"run_id": run_id, "attempt": 1, "rank": 0, "world_size": 1, "aggregation_scope": "rank_local"}
    arrays = []
    for column in schema.arrow:
        value = columns.get(column.name, shared.get(column.name))
        if value is None:
            arrays.append(pa.nulls(rows, column.type))
        elif isinstance(value, pa.Array | np.ndarray | list):
            arrays.append(pa.array(value).cast(column.type))
        else:
            arrays.append(pa.repeat(pa.scalar(value, column.type), rows))
    part = PartMeta(
        table=table, schema_version=schema.version, run_id=run_id, attempt=1, writer="r0", seq=1,
        parent_attempt=None, first_step=1, world_size=1, loopscope_version="0",
    )  # fmt: skip
    write_part(LOCAL_DISK, root, schema, part, [pa.table(arrays, schema=schema.arrow)])


def _loss(shape: Shape, generator: np.random.Generator) -> dict[str, Any]:
    steps = np.arange(1, shape.steps + 1)
    task = 3 + 4 * np.exp(-steps / (shape.steps / 5)) + generator.normal(0, 0.05, shape.steps)
    lb = 1.02 + 0.01 * generator.random(shape.steps)
    return {
        "step": steps, "tokens_seen": steps * shape.tokens, "elapsed_s": steps * 0.1, "task_loss": task,
        "lb_loss": lb, "lb_loss_factor": 0.01, "z_loss": np.full(shape.steps, 5.0), "z_loss_factor": 0.001,
        "total_loss": task + 0.01 * lb + 0.005, "closure_error": generator.normal(0, 1e-7, shape.steps),
        "grad_norm": np.exp(generator.normal(0, 0.2, shape.steps)), "lr": 1e-3 * (1 - steps / (shape.steps + 1)),
        "num_target_tokens": shape.tokens,
    }  # fmt: skip


def _router(shape: Shape, traced: np.ndarray, visits: Any, generator: np.random.Generator) -> dict[str, Any]:
    rows = len(traced) * len(visits)
    fair = shape.tokens * shape.top_k / shape.experts
    counts = np.maximum(1, generator.normal(fair, fair / 20, (rows, shape.experts))).astype(np.int64)
    share = counts / counts.sum(1, keepdims=True)
    entropy = -(share * np.log(share)).sum(1) / np.log(shape.experts)
    flat = pa.array(counts.ravel())
    lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * shape.experts, flat)
    return keys(traced, visits) | {
        "num_experts": shape.experts, "top_k": shape.top_k, "num_tokens": shape.tokens, "num_microbatches": 1,
        "num_loop_steps": shape.loops, "score_func": "softmax", "expert_count": lists,
        "load_entropy_ratio": entropy, "maxvio_count": share.max(1) * shape.experts - 1,
        "dead_experts": np.zeros(rows, np.int64), "token_entropy_ratio": 0.6 + 0.1 * generator.random(rows),
        "mutual_information": np.full(rows, 0.5), "z_mean": 2 + 0.1 * generator.random(rows),
        "logit_abs_max": np.full(rows, 6.0), "margin_p50": generator.random(rows), "nonfinite_count": 0,
    }  # fmt: skip


def _residual(
    shape: Shape, traced: np.ndarray, visits: Any, generator: np.random.Generator
) -> dict[str, Any]:
    found = keys(traced, visits)
    rows = len(found["step"])
    return found | {
        "num_tokens": shape.tokens, "norm_mean": 10 + found["unrolled_pos"] + generator.random(rows),
        "token_correlation": 0.2 + 0.1 * generator.random(rows),
    }  # fmt: skip


def _transition(shape: Shape, traced: np.ndarray, generator: np.random.Generator) -> dict[str, Any]:
    pairs = [(r, layer) for r in range(1, shape.loops) for layer in range(shape.layers)]
    count = len(traced)
    rows = count * len(pairs)
    ends = np.tile([r for r, _ in pairs], count)
    layers = np.tile([layer for _, layer in pairs], count)
    to = 1 + ends * shape.layers + layers
    return {
        "step": np.repeat(traced, len(pairs)), "kind": "step_boundary", "from_pos": to - shape.layers, "to_pos": to,
        "from_loop_step": ends - 1, "to_loop_step": ends, "from_layer_idx": layers, "to_layer_idx": layers,
        "num_loop_steps": shape.loops, "num_tokens": shape.tokens,
        "growth": np.sqrt(1 + 1 / ends) + generator.normal(0, 1e-3, rows), "relative_delta": 0.5 / ends,
        "state_cosine": 1 - 0.1 / ends, "topk_overlap": 0.6 + 0.1 * generator.random(rows),
        "overlap_chance": shape.top_k / shape.experts,
    }  # fmt: skip


def _health(traced: np.ndarray, visits: int) -> dict[str, Any]:
    count = len(traced)
    return {
        "step": np.repeat(traced, 2), "event": ["coverage", "timing"] * count, "severity": "info",
        "value": np.tile([1.0, 0.01], count), "count": np.tile([visits, 1], count),
    }  # fmt: skip


def _system(traced: np.ndarray) -> dict[str, Any]:
    """A machine and one accelerator, sampled at every traced step."""
    count = len(traced)
    when = np.datetime64("2026-01-01T00:00:00", "us") + np.arange(count) * np.timedelta64(10, "s")

    def of(host: float, card: float | None) -> list[float | None]:
        return [host, card] * count

    return {
        "step": np.repeat(traced, 2), "host": "node1", "device": ["host", "gpu0"] * count,
        "sampled_at": pa.array(np.repeat(when, 2)).cast(pa.timestamp("us", "UTC")), "rank": None,
        "interval_s": of(10.0, None), "cpu_percent": of(60.0, None), "memory_used": of(2e10, None),
        "memory_total": of(1e11, None), "process_memory": of(5e9, None), "disk_read": of(1e6, None),
        "disk_written": of(2e6, None), "net_received": of(3e6, None), "net_sent": of(4e6, None),
        "gpu_percent": [None, 97.0] * count, "gpu_memory_percent": [None, 40.0] * count,
        "gpu_memory_used": [None, 6e10] * count, "power": [None, 650.0] * count, "temperature": [None, 61.0] * count,
    }  # fmt: skip
