"""Small models whose deep probe is known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loopscope.probe import EncodedCorpus
from loopscope.probe.encode import token_hash
from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta, TracePoint

VOCAB, WIDTH, EXPERTS, TOP_K = 13, 8, 6, 2


def encoded(documents: int = 4, length: int = 12, seed: int = 0) -> EncodedCorpus:
    ids = torch.randint(VOCAB, (documents, length), generator=torch.Generator().manual_seed(seed)).numpy()
    return EncodedCorpus(
        name="tiny",
        input_ids=ids,
        corpus_hash=token_hash(ids),
        strata={"domain": ["a", "b"] * (documents // 2)},
        dropped_first_token=False,
    )


class LinearLoop(nn.Module):
    """h ← h·A at every pass, A = radius × a rotation; routes by a fixed gate, which moves nothing."""

    def __init__(self, radius: float = 1.0, steps: int = 4, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.steps, self.noise = steps, noise
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.stack = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.lm_head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            self.stack.weight.copy_(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0] * radius)

    def trace_meta(self) -> TraceMeta:
        return TraceMeta(num_stacks=self.steps, num_layers_in_stack=1, num_experts=EXPERTS, num_active=TOP_K)

    def loop_entry(self) -> nn.Module:
        return self.stack

    def loop_readout(self, h: Tensor, *, readout: str = "tail") -> Tensor:
        return self.lm_head(h)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for step in range(self.steps):
            h = self.stack(h) + self.noise * torch.randn_like(h)
            logits = self.gate(h)
            probs = logits.softmax(-1)
            weights, idx = probs.topk(TOP_K)
            ACTIVE_TRACE_SINK.record(
                TracePoint(
                    block="loop",
                    unrolled_pos=step,
                    loop_step=step,
                    layer_idx=0,
                    num_experts=EXPERTS,
                    top_k=TOP_K,
                    router_logits=logits.detach(),
                    router_probs=probs.detach(),
                    topk_idx=idx,
                    topk_weights=(weights / weights.sum(-1, keepdim=True)).detach(),
                    residual=h.detach(),
                )
            )
        return self.lm_head(h)


class Identity(LinearLoop):
    """A loop that has converged: every pass leaves h as it is, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.stack.weight.copy_(torch.eye(WIDTH))


class Bare(LinearLoop):
    """A model with the trace contract alone."""

    loop_entry = None  # type: ignore[assignment]
    loop_readout = None  # type: ignore[assignment]
