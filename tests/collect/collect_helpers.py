"""Sinks made by hand, for the tests of loopscope.collect."""

from __future__ import annotations

import torch

from loopscope.trace import TraceMeta, TracePoint, TraceWindow, VisitSpec

HEAD, LAYERS, STEPS, TAIL = 1, 2, 3, 1


def specs(
    *, head=HEAD, layers=LAYERS, steps=STEPS, tail=TAIL, outer=(8, 2), loop=(4, 2)
) -> tuple[VisitSpec, ...]:
    """The visits of head + (layers × steps) + tail."""
    found = []

    def add(block, step, layer, sizes):
        found.append(
            VisitSpec(
                unrolled_pos=len(found),
                block=block,
                loop_step=step,
                layer_idx=layer,
                num_experts=sizes[0],
                top_k=sizes[1],
            )
        )

    for _ in range(head):
        add("head", 0, 0, outer)
    for step in range(steps):
        for layer in range(layers):
            add("loop", step, layer, loop)
    for _ in range(tail):
        add("tail", 0, 0, outer)
    return tuple(found)


def meta(*, steps=STEPS, layers=LAYERS) -> TraceMeta:
    return TraceMeta(num_stacks=steps, num_layers_in_stack=layers, num_experts=4, num_active=2)


def point(spec: VisitSpec, *, batch=2, seq=5, width=6, seed=0, logits=None, idx=None, residual=None):
    """A visit with random tensors, or with the ones given. Logits decide the choice unless `idx` is given."""
    generator = torch.Generator().manual_seed(seed * 1000 + spec.unrolled_pos)
    if residual is None:
        residual = torch.randn(batch, seq, width, generator=generator)
    coordinates = {
        "block": spec.block,
        "unrolled_pos": spec.unrolled_pos,
        "loop_step": spec.loop_step,
        "layer_idx": spec.layer_idx,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
    }
    if spec.num_experts == 0:
        tensors = dict.fromkeys(("router_logits", "router_probs", "topk_idx", "topk_weights"))
        return TracePoint(**coordinates, **tensors, residual=residual)
    if logits is None:
        logits = torch.randn(batch, seq, spec.num_experts, generator=generator)
    probs = logits.softmax(-1)
    if idx is None:
        idx = logits.topk(spec.top_k, dim=-1).indices
    weights = probs.gather(-1, idx)
    weights = weights / weights.sum(-1, keepdim=True)
    return TracePoint(
        **coordinates,
        router_logits=logits,
        router_probs=probs,
        topk_idx=idx,
        topk_weights=weights,
        residual=residual,
    )


def sink(visits: tuple[VisitSpec, ...] | None = None, **how) -> TraceWindow:
    """A window with one point per visit."""
    window = TraceWindow()
    for spec in specs() if visits is None else visits:
        window[spec.unrolled_pos] = point(spec, **how)
    return window


def split(window: TraceWindow, parts: int) -> list[TraceWindow]:
    """The same tokens as `parts` microbatches along the batch dimension."""
    windows = [TraceWindow() for _ in range(parts)]
    for position, whole in window.items():
        fields = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
        for number, part in enumerate(windows):
            cut = {
                name: tensor.chunk(parts)[number]
                for name, tensor in whole.tensors().items()
                if name != "expert_bias"
            }
            part[position] = TracePoint(**{**fields, **cut})
    return windows
