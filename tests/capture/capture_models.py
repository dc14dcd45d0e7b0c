"""Models of strangers: nothing in them knows loopscope."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, EXPERTS, TOP_K, VOCAB = 16, 6, 2, 32

ROUTING: dict[str, Any] = {
    "num_experts": EXPERTS, "top_k": TOP_K, "score_func": "softmax", "order": "score_then_topk", "normalised": True,
    "balancing": "none",
}  # fmt: skip
ROUTER_TENSORS = {
    "router_logits": "output[1][0]",
    "topk_weights": "output[1][1]",
    "topk_idx": "output[1][2]",
}
BLOCK: dict[str, Any] = {"tensors": {"residual": "output"}, "placements": {}, "merge": "sum"}
ROUTER: dict[str, Any] = {"tensors": ROUTER_TENSORS, "placements": {}, "merge": "sum", "routing": ROUTING}


class Mixture(nn.Module):
    """Softmax top-k mixture that returns (output, (logits, weights, indices))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.gate(x)
        weights, idx = logits.softmax(-1).topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        every = torch.einsum("bsd,edf->bsef", x, self.experts)
        chosen = every.gather(2, idx[..., None].expand(*idx.shape, WIDTH))
        return (chosen * weights[..., None]).sum(2), (logits, weights, idx)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        mixed, _ = self.moe(self.norm(x))
        return x + scale * mixed


class Recurrent(nn.Module):
    """Like Huginn: a prelude, a core of two blocks that runs R times from a random state, a coda."""

    def __init__(self, loops: int = 3) -> None:
        super().__init__()
        self.loops = loops
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.prelude, self.coda = Block(), Block()
        self.core = nn.ModuleList([Block(), Block()])
        self.adapt = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        e = self.prelude(self.embed(ids))
        h = torch.ones_like(e)
        for _ in range(self.loops):
            h = self.adapt(torch.cat([h, e], -1))
            for block in self.core:
                h = block(h)
        return self.head(self.coda(h))


def plan(loops: int | None = 3) -> dict[str, Any]:
    """A capture plan of `Recurrent`."""
    return {
        "*.moe": dict(ROUTER),
        "prelude": dict(BLOCK),
        "core.?": {**BLOCK, "calls": loops},
        "coda": dict(BLOCK),
    }


def make(loops: int = 3) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(loops)


def meta_model() -> Recurrent:
    return Recurrent()


def ids(seed: int = 0, batch: int = 2, seq: int = 8) -> Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, seed: int = 0) -> Tensor:
    loss = model(ids(seed)).square().mean()
    loss.backward()
    return loss
