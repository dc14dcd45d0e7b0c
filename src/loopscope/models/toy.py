"""A looped MoE of plain torch, which implements the trace contract as any other model would.

Token mixing is a causal running mean, so that the whole network fits on a page. Blocks always return their
raw router tensors; the eager outer loop of `forward` records them, or drops them where the sink is not armed.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta, TracePoint, VisitSpec

Visit = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]


class ToyBlock(nn.Module):
    """Residual block: causal mean, then a top-k mixture of E small experts, no dropping."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.Parameter(torch.randn(num_experts, width, width) * width**-0.5)

    def forward(self, h_BSD: Tensor) -> Visit:
        """(h [B,S,d], load-balancing loss, z-loss, (logits, probs, idx, weights)); losses are scalars."""
        x_BSD = self.norm(h_BSD)
        count_S1 = torch.arange(1, h_BSD.shape[1] + 1, device=h_BSD.device).unsqueeze(-1)
        x_BSD = x_BSD + self.mix(x_BSD.cumsum(dim=1) / count_S1)
        logits_BSE = self.gate(x_BSD)
        probs_BSE = logits_BSE.float().softmax(dim=-1)
        top_BSK, idx_BSK = probs_BSE.topk(self.top_k)
        weights_BSK = top_BSK / top_BSK.sum(dim=-1, keepdim=True)
        one_hot_BSKE = F.one_hot(idx_BSK, self.num_experts).to(x_BSD.dtype)
        combine_BSE = (one_hot_BSKE * weights_BSK.unsqueeze(-1)).sum(dim=2)
        out_BSD = torch.einsum("bsd,edf,bse->bsf", x_BSD, self.experts, combine_BSE).tanh()
        lb = self.num_experts * (one_hot_BSKE.mean(dim=(0, 1, 2)) * probs_BSE.mean(dim=(0, 1))).sum()
        z = logits_BSE.float().logsumexp(dim=-1).square().mean()
        return h_BSD + out_BSD, lb, z, (logits_BSE, probs_BSE, idx_BSK, weights_BSK)


class ToyLoopMoE(nn.Module):
    """Head block, a stack of L blocks called R times, tail block; head and tail have their own E."""

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int = 32,
        num_layers_in_stack: int = 2,
        num_stacks: int = 3,
        num_experts: int = 8,
        outer_experts: int = 4,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        self.num_stacks, self.top_k = num_stacks, top_k
        self.num_experts, self.outer_experts = num_experts, outer_experts
        self.embed, self.lm_head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False)
        self.head, self.tail = (ToyBlock(width, outer_experts, top_k) for _ in range(2))
        self.stack = nn.ModuleList(ToyBlock(width, num_experts, top_k) for _ in range(num_layers_in_stack))

    def forward(self, ids_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [B,S,V], mean load-balancing loss, mean z-loss over all visits)."""
        h, lbs, zs = self.embed(ids_BS), [], []
        for spec in self.expected_visits():
            block = self.stack[spec.layer_idx] if spec.block == "loop" else getattr(self, spec.block)
            h, lb, z, trace = block(h)
            _record(spec, trace, h)
            lbs.append(lb)
            zs.append(z)
            del trace  # the last visit's tensors must not live on in this frame
        return self.lm_head(h), torch.stack(lbs).mean(), torch.stack(zs).mean()

    def loop_readout(self, h_BSD: Tensor, *, readout: str = "tail") -> Tensor:
        """Logits [B, S, V] from a state of the loop [B, S, d], as if the loop ended there."""
        return cast(Tensor, self.lm_head(self.tail(h_BSD)[0] if readout == "tail" else h_BSD))

    def loop_entry(self) -> nn.Module:
        """The module whose first argument is the loop's state."""
        return self.stack[0]

    def trace_meta(self) -> TraceMeta:
        """What a collector must know of this model's loop."""
        return TraceMeta(
            num_stacks=self.num_stacks,
            num_layers_in_stack=len(self.stack),
            num_experts=self.num_experts,
            num_active=self.top_k,
        )

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """Every visit of one forward, in execution order."""
        loop = [("loop", r, i) for r in range(self.num_stacks) for i in range(len(self.stack))]
        return tuple(
            VisitSpec(
                block=block,  # type: ignore[arg-type]  # a list of literals is a list of str to mypy
                unrolled_pos=position,
                loop_step=loop_step,
                layer_idx=layer_idx,
                num_experts=self.num_experts if block == "loop" else self.outer_experts,
                top_k=self.top_k,
            )
            for position, (block, loop_step, layer_idx) in enumerate([("head", 0, 0), *loop, ("tail", 0, 0)])
        )


def _record(spec: VisitSpec, trace: tuple[Tensor, Tensor, Tensor, Tensor], h_BSD: Tensor) -> None:
    if not ACTIVE_TRACE_SINK.armed:
        return
    logits, probs, idx, weights = (tensor.detach() for tensor in trace)
    ACTIVE_TRACE_SINK.record(
        TracePoint(
            block=spec.block,
            unrolled_pos=spec.unrolled_pos,
            loop_step=spec.loop_step,
            layer_idx=spec.layer_idx,
            num_experts=logits.shape[-1],
            top_k=idx.shape[-1],
            router_logits=logits,
            router_probs=probs,
            topk_idx=idx,
            topk_weights=weights,
            residual=h_BSD.detach(),
        )
    )
