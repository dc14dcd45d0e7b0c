"""The models that the described cases speak of, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta, TracePoint, VisitSpec


def meta(*, steps, layers, experts=4, active=1):
    return TraceMeta(num_stacks=steps, num_layers_in_stack=layers, num_experts=experts, num_active=active)


def point(spec: VisitSpec, logits, residual=None, idx=None):
    """A visit as a softmax router makes it; `idx` overrules the choice."""
    probs = logits.softmax(-1)
    if idx is None:
        idx = logits.topk(spec.top_k, dim=-1).indices
    weights = probs.gather(-1, idx)
    return TracePoint(
        block=spec.block,
        unrolled_pos=spec.unrolled_pos,
        loop_step=spec.loop_step,
        layer_idx=spec.layer_idx,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        router_logits=logits.detach(),
        router_probs=probs.detach(),
        topk_idx=idx,
        topk_weights=(weights / weights.sum(-1, keepdim=True)).detach(),
        residual=(torch.ones(*logits.shape[:2], 2) if residual is None else residual).detach(),
    )


def loop_spec(pos, *, step=0, layer=0, experts, k, block="loop"):
    return VisitSpec(
        unrolled_pos=pos, block=block, loop_step=step, layer_idx=layer, num_experts=experts, top_k=k
    )


def balanced(spec: VisitSpec, tokens_per_expert=2):
    """A visit in which every expert is chosen equally often and every probability is 1/E."""
    tokens = spec.num_experts * tokens_per_expert
    idx = torch.arange(tokens * spec.top_k).reshape(1, tokens, spec.top_k) % spec.num_experts
    return point(spec, torch.zeros(1, tokens, spec.num_experts), idx=idx)


class CheckpointedLoop(nn.Module):
    """Linear, Tanh, Linear with a router inside, run twice, each visit under activation checkpointing."""

    def __init__(self, *, reentrant: bool | None, early_stop: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 4)
        self.reentrant = reentrant
        self.early_stop = early_stop
        self.forwards = 0

    def block(self, h):
        self.forwards += 1
        logits = self.router(h)
        ACTIVE_TRACE_SINK.record(
            point(loop_spec(self.step, step=self.step, experts=4, k=2), logits.detach(), h.detach())
        )
        return h + self.down(self.up(h).tanh()) * logits.softmax(-1).amax(-1, keepdim=True)

    def forward(self, h):
        for self.step in range(2):
            if self.reentrant is None:
                h = self.block(h)
            elif self.reentrant:
                h = checkpoint(self.block, h, use_reentrant=True)
            else:
                h = checkpoint(self.block, h, use_reentrant=False, early_stop=self.early_stop)
        return h
