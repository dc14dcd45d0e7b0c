"""Points, models and collectors that the trace tests share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loopscope.trace import ACTIVE_TRACE_SINK, NullCollector, TraceMeta, TracePoint, TraceSink

B, S, E, K, D, V = 4, 6, 5, 2, 8, 11


def router(batch: int = B, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, probs, idx, weights), random."""
    logits = torch.randn(batch, S, E, generator=torch.Generator().manual_seed(seed))
    probs = logits.softmax(-1)
    top, idx = probs.topk(K)
    return logits, probs, idx, top / top.sum(-1, keepdim=True)


def make_point(position: int = 0, **changes: object) -> TracePoint:
    logits, probs, idx, weights = router(seed=position)
    fields: dict[str, object] = {
        "block": "loop",
        "unrolled_pos": position,
        "loop_step": position,
        "layer_idx": 0,
        "num_experts": E,
        "top_k": K,
        "router_logits": logits,
        "router_probs": probs,
        "topk_idx": idx,
        "topk_weights": weights,
        "residual": torch.randn(B, S, D),
    }
    return TracePoint(**{**fields, **changes})  # type: ignore[arg-type]


META = TraceMeta(num_stacks=2, num_layers_in_stack=1, num_experts=E, num_active=K)


class ForeignModel(nn.Module):
    """A model that is not ours: one shared layer called `loops` times, routing by a linear gate."""

    def __init__(self, loops: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.loops = loops
        self.emb = nn.Embedding(V, D)
        self.gate = nn.Linear(D, E, bias=False)
        self.layer = nn.Linear(D, D)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(D, V)
        self.register_buffer("tokens", torch.zeros(E))

    def trace_meta(self) -> TraceMeta:
        return TraceMeta(num_stacks=self.loops, num_layers_in_stack=1, num_experts=E, num_active=K)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for step in range(self.loops):
            logits = self.gate(h)
            probs = logits.softmax(-1)
            top, idx = probs.topk(K)
            h = h + self.drop(self.layer(h)).tanh() * top.sum(-1, keepdim=True)
            ACTIVE_TRACE_SINK.record(
                TracePoint(
                    block="loop",
                    unrolled_pos=step,
                    loop_step=step,
                    layer_idx=0,
                    num_experts=E,
                    top_k=K,
                    router_logits=logits.detach(),
                    router_probs=probs.detach(),
                    topk_idx=idx.detach(),
                    topk_weights=(top / top.sum(-1, keepdim=True)).detach(),
                    residual=h.detach(),
                )
            )
        return self.out(h)


class SeenProbe(NullCollector):
    """Copies what a probe handed over, to compare."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.loss = torch.empty(0)
        self.meta: TraceMeta | None = None
        self.faults: list[str] = []

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor
    ) -> dict[str, float]:
        self.calls.append(step)
        self.tensors = {
            position: {name: tensor.clone() for name, tensor in point.tensors().items()}
            for position, point in sink.items()
        }
        self.loss, self.meta = per_token_loss.clone(), meta
        self.faults = list(getattr(sink, "faults", []))
        return {"probe/loss": float(per_token_loss.sum())}


def ids(batch: int = B, length: int = S, seed: int = 3) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))
