"""The reductions alone: a trace of random tensors against the time it takes to read them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from loopscope.collect.accumulate import StepAccumulator
from loopscope.metrics import forget_kernels, warm_up_like
from loopscope.trace import TracePoint, VisitSpec


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], repeats: int, device: str) -> tuple[float, float]:
    """(minimum, median) in microseconds."""
    run()
    times = []
    for _ in range(repeats):
        sync(device)
        begun = time.perf_counter()
        run()
        sync(device)
        times.append((time.perf_counter() - begun) * 1e6)
    return min(times), statistics.median(times)


def make_trace(
    specs: Iterable[VisitSpec], *, batch: int, seq: int, width: int, dtype: torch.dtype, device: str
) -> dict[int, TracePoint]:
    """A visit per spec, as a softmax router of this type would make it; float32 router as in the model."""
    generator = torch.Generator().manual_seed(0)
    sink = {}
    for spec in specs:
        logits = torch.randn(batch, seq, spec.num_experts, generator=generator)
        probs = logits.softmax(-1)
        weights, idx = probs.topk(spec.top_k, dim=-1)
        residual = torch.randn(batch, seq, width, generator=generator)
        sink[spec.unrolled_pos] = TracePoint(
            block=spec.block,
            unrolled_pos=spec.unrolled_pos,
            loop_step=spec.loop_step,
            layer_idx=spec.layer_idx,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            router_logits=logits.to(device, dtype),
            router_probs=probs.to(device, dtype),
            topk_idx=idx.to(device),
            topk_weights=(weights / weights.sum(-1, keepdim=True)).to(device, dtype),
            residual=residual.to(device, dtype),
        )
    return sink


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def reductions(sink: dict[int, TracePoint], *, repeats: int, device: str, compiled: bool) -> dict[str, float]:
    """Times of one traced step's reductions, and their floor: reading what they must read, once."""
    visits = nbytes(x for point in sink.values() for x in point.tensors().values())
    probe = StepAccumulator()
    probe.add(sink)
    pairs = [key for key in probe.partials if not isinstance(key, VisitSpec)]
    pair_bytes = 0
    for pair in pairs:
        source, target = sink[pair.source.unrolled_pos], sink[pair.target.unrolled_pos]
        pair_bytes += source.residual.nbytes + target.residual.nbytes
        if pair.before is not None:
            pair_bytes += sink[pair.before].residual.nbytes
        if pair.same_layer:
            pair_bytes += nbytes(x for x in (source.topk_idx, target.topk_idx) if x is not None)
    buffer = torch.randn((visits + pair_bytes) // 4, device=device)
    floor = timed(lambda: buffer.sum(), 4 * repeats, device)
    found: dict[str, float] = {
        "trace_mb": visits / 1e6,
        "pairs_mb": pair_bytes / 1e6,
        "bandwidth_gb_s": (visits + pair_bytes) / floor[0] / 1e3,
    }
    share = visits / (visits + pair_bytes)
    record(found, "floor", floor)
    found["floor_visits_min_us"] = floor[0] * share

    def only_visits() -> None:
        StepAccumulator().add(sink, plan=lambda visits: ())

    def everything() -> None:
        StepAccumulator().add(sink)

    for name, run in (("visits", only_visits), ("all", everything)):
        record(found, f"eager_{name}", timed(run, repeats, device))
        found[f"eager_{name}_extra_mb"] = extra_memory(run, device) / 1e6
    record(found, "naive_item", timed(lambda: naive(sink), repeats, device))
    if compiled:
        done = warm_up_like(everything)
        found["warm_up_s"], found["kernels"] = done.seconds, done.compiled
        for reason in done.failed:
            print(f"  not compiled: {reason}")
        for name, run in (("visits", only_visits), ("all", everything)):
            record(found, f"compiled_{name}", timed(run, 3 * repeats, device))
            found[f"compiled_{name}_extra_mb"] = extra_memory(run, device) / 1e6
        found["compiled_visits_per_floor"] = found["compiled_visits_min_us"] / found["floor_visits_min_us"]
        found["compiled_all_per_floor"] = found["compiled_all_min_us"] / floor[0]
        found["compiled_extra_per_trace"] = found["compiled_all_extra_mb"] / found["trace_mb"]
        forget_kernels()
    found["eager_visits_per_floor"] = found["eager_visits_min_us"] / found["floor_visits_min_us"]
    found["eager_all_per_floor"] = found["eager_all_min_us"] / floor[0]
    found["naive_per_floor"] = found["naive_item_min_us"] / found["floor_visits_min_us"]
    return found


def record(found: dict[str, float], name: str, times: tuple[float, float]) -> None:
    found[f"{name}_min_us"], found[f"{name}_median_us"] = times


def naive(sink: dict[int, TracePoint]) -> None:
    """What callbacks usually do: every statistic on its own, each with its own `.item()`."""
    for point in sink.values():
        logits, probs, idx = point.router_logits, point.router_probs, point.topk_idx
        assert logits is not None
        assert probs is not None
        assert idx is not None
        counts = torch.bincount(idx.reshape(-1), minlength=point.num_experts)
        f, p = counts / counts.sum(), probs.float().mean((0, 1))
        z = torch.logsumexp(logits.float(), -1)
        top = logits.float().topk(min(point.top_k + 1, point.num_experts), -1).values
        h = point.residual.float()
        norm = h.norm(dim=-1)
        unit = h / norm[..., None]
        seq = h.shape[1]
        for value in (
            counts.max() * point.num_experts / counts.sum() - 1,
            (counts == 0).sum(),
            -(f * f.clamp(min=1e-30).log()).sum(),
            point.num_experts * (f * p).sum(),
            -(probs.float() * probs.float().clamp(min=1e-30).log()).sum(-1).mean(),
            probs.amax(-1).float().mean(),
            z.mean(),
            z.std(),
            z.min(),
            z.max(),
            z.square().mean(),
            (z < 0).float().mean(),
            (top[..., 0] - top[..., point.top_k - 1]).mean(),
            (top[..., point.top_k - 1] - top[..., -1]).mean(),
            logits.float().square().mean().sqrt(),
            logits.abs().max(),
            (~logits.isfinite()).sum(),
            norm.mean(),
            h.square().mean().sqrt(),
            h.abs().max(),
            ((unit.sum(1).square().sum(-1) - seq) / max(seq * (seq - 1), 1)).mean(),
        ):
            value.item()


def extra_memory(run: Callable[[], object], device: str) -> int:
    """Peak bytes that a run holds beside what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    held = peak = 0
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)
