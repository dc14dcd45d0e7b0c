"""Training steps with and without loopscope, in turns: absent, disarmed, armed, traced."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from trace_reductions import sync

from loopscope.collect import ParquetCollector, RowContext, reduce_trace
from loopscope.collect.writer import MemoryWriter
from loopscope.metrics import forget_kernels, warm_up_like
from loopscope.models.loopmoe import FLAVORS, build_config
from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta

_WAITING = ("item", "tolist", "cpu", "numpy")


class Steps:
    """A model of the flavour and the ways to train it by one step."""

    def __init__(self, flavor: str, *, batch: int, seq: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        shape = FLAVORS[flavor]
        model: Any = build_config(shape).build()
        model.init_weights(buffer_device=None)
        self.model = model.to(device)
        self.device = device
        self.cast = torch.autocast(device, dtype, enabled=dtype != torch.float32)
        self.tokens = torch.randint(0, shape.vocab_size, (batch, seq), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.writer = MemoryWriter()
        self.collector = ParquetCollector(
            self.writer,
            context=RowContext(run_id="bench"),
            expected_visits=self.model.expected_visits(),
            on_error="raise",
        )
        self.meta: TraceMeta = self.model.trace_meta()
        self.step = 0
        self.trace_seconds: list[float] = []

    def train(self, *, armed: bool = False, traced: bool = False) -> None:
        self.step += 1
        if armed or traced:
            ACTIVE_TRACE_SINK.arm()
        with self.cast:
            output = self.model(self.tokens, return_aux=True)
        window = ACTIVE_TRACE_SINK.disarm() if armed or traced else None
        logits = output.logits if hasattr(output, "logits") else output[0]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), self.tokens.flatten())
        if traced:
            begun = time.perf_counter()
            self.collector.on_trace_step(self.step, window, self.meta)  # type: ignore[arg-type]
            self.trace_seconds.append(time.perf_counter() - begun)
        del window, output
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> float:
        ACTIVE_TRACE_SINK.arm()
        with torch.no_grad(), self.cast:
            self.model(self.tokens, return_aux=True)
        window = ACTIVE_TRACE_SINK.disarm()
        assert window is not None
        return warm_up_like(lambda: reduce_trace(window, self.meta)).seconds


@contextmanager
def absent_sink() -> Any:
    """As if the model had no trace at all: what it hands over goes nowhere."""
    kind = type(ACTIVE_TRACE_SINK)
    record = kind.record
    kind.record = lambda self, point: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.record = record  # type: ignore[method-assign]


@contextmanager
def counted_waits(counts: dict[str, int]) -> Any:
    """Count the tensor methods that wait for a device."""
    saved = {name: getattr(torch.Tensor, name) for name in _WAITING}

    def counting(name: str) -> Callable[..., Any]:
        def called(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return saved[name](self, *args, **kwargs)

        return called

    for name in _WAITING:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield
    finally:
        for name, method in saved.items():
            setattr(torch.Tensor, name, method)


def steps(
    flavor: str, *, batch: int, seq: int, device: str, dtype: torch.dtype, rounds: int, compiled: bool
) -> dict[str, float]:
    """Step times in turns, their ratios, and what a traced step waits for."""
    run = Steps(flavor, batch=batch, seq=seq, device=device, dtype=dtype)

    def absent() -> None:
        with absent_sink():
            run.train()

    ways: dict[str, Callable[[], None]] = {
        "absent": absent,
        "absent_again": absent,
        "disarmed": run.train,
        "armed": lambda: run.train(armed=True),
        "traced": lambda: run.train(traced=True),
    }
    found: dict[str, float] = {}
    if compiled:
        found["warm_up_s"] = run.warm_up()
    absent()
    ways["traced"]()
    run.trace_seconds.clear()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        first = turn % len(ways)
        names = (*list(ways)[first:], *list(ways)[:first])
        for name in names:
            sync(device)
            begun = time.perf_counter()
            ways[name]()
            sync(device)
            times[name].append(time.perf_counter() - begun)
            print(
                f"  round {turn + 1} of {rounds}, {name}: {times[name][-1]:.2f} s",
                file=sys.stderr,
                flush=True,
            )
    for name, values in times.items():
        found[f"{name}_min_ms"] = min(values) * 1e3
        found[f"{name}_median_ms"] = statistics.median(values) * 1e3
    for name in ("absent_again", "disarmed", "armed", "traced"):
        found[f"{name}_per_absent"] = found[f"{name}_min_ms"] / found["absent_min_ms"]
    callback = min(run.trace_seconds) * 1e3
    found["callback_min_ms"] = callback
    found["callback_median_ms"] = statistics.median(run.trace_seconds) * 1e3
    found["traced_every_step_percent"] = 100 * callback / found["absent_min_ms"]
    found["traced_every_10_percent"] = 10 * callback / found["absent_min_ms"]
    counts: dict[str, int] = {}
    with counted_waits(counts):
        run.train()
    untraced = sum(counts.values())
    with counted_waits(counts):
        run.train(traced=True)
    # What the model itself waits for is in both; `.numpy()` of what `.cpu()` brought waits for nothing.
    found["waits_of_an_untraced_step"] = untraced
    found["transfers_per_traced_step"] = sum(counts.values()) - 2 * untraced - counts.get("numpy", 0)
    timing = run.writer.rows("health", event="timing")[-1]
    print(f"  the callback's own account: {timing['detail']}")
    forget_kernels()
    return found
