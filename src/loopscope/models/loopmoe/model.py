"""The reference looped MoE: head, shared stack of L layers run R times, tail."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import ModuleDict

from loopscope.errors import ConfigError
from loopscope.models.loopmoe.block import BlockOutput, LoopMoEBlock
from loopscope.models.loopmoe.parallelize import annotate_state
from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta, TracePoint, VisitSpec, unrolled_position


class LoopMoEOutput(NamedTuple):
    """What a forward for training returns: the auxiliary losses beside the logits, not stored on the module."""

    logits: Tensor
    """[B, S, V]; the hidden states [B, S, d] where the head runs inside a chunked loss."""
    lb_loss: Tensor
    """Mean over all visits of the load-balancing loss, a scalar with gradient."""
    z_loss: Tensor
    """Mean over all visits of the router z-loss, a scalar with gradient."""


class LoopMoEModel(Decoder):
    """Decoder whose `layers` are "head", "loop_0" .. "loop_{L-1}" and "tail", all direct children."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        """`layers` holds the blocks in the order head, stack, tail; the stack is what lies between."""

        num_loop_steps: int
        """R: how often the stack runs in one forward."""
        lb_loss_factor: float = 0.01
        """Factor of the load-balancing loss in the objective."""
        z_loss_factor: float = 0.001
        """Factor of the router z-loss in the objective."""

        def __post_init__(self) -> None:
            """Refuse shapes that are not a looped MoE."""
            off = "expected >= 0; 0 switches the term off"
            for fits, message in (
                (
                    self.num_loop_steps >= 1,
                    f"num_loop_steps (R) is {self.num_loop_steps}, expected >= 1: the stack must run at least once",
                ),
                (
                    len(self.layers) >= 3,
                    f"layers has {len(self.layers)} block(s), expected head + L >= 1 stack blocks + tail, so at "
                    "least 3",
                ),
                (self.lb_loss_factor >= 0.0, f"lb_loss_factor is {self.lb_loss_factor}, {off}"),
                (self.z_loss_factor >= 0.0, f"z_loss_factor is {self.z_loss_factor}, {off}"),
                (
                    not self.enable_weight_tying,
                    "enable_weight_tying is True; the reference model keeps embedding and head apart",
                ),
            ):
                if not fits:
                    raise ConfigError(message)

        @property
        def num_layers_in_stack(self) -> int:
            """L."""
            return len(self.layers) - 2

        def layer_names(self) -> list[str]:
            """Names of the blocks under `model.layers`, in the order of `layers`."""
            return ["head", *(f"loop_{i}" for i in range(self.num_layers_in_stack)), "tail"]

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take sequence length and debug flags from the trainer's configuration; annotate the state."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            annotate_state(self)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """(parameters, FLOPs per token of forward and backward); a shared layer costs R times, is stored once."""
            nparams = sum(p.numel() for p in model.parameters())
            runs = [1, *[self.num_loop_steps] * self.num_layers_in_stack, 1]
            flops = sum(
                times * _block_flops(layer, self.dim, seq_len)
                for times, layer in zip(runs, self.layers, strict=True)
            )
            return nparams, 6 * self.dim * self.vocab_size + flops

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Decoder names its layers "0", "1", ...; a reader of a checkpoint should see which block is which.
        self.layers = ModuleDict(
            dict(zip(config.layer_names(), self._modules["layers"].children(), strict=True))
        )

    def visits(self) -> Iterator[tuple[str, VisitSpec]]:
        """(name under `layers`, VisitSpec) of every visit of one forward, in execution order."""
        head, *stack, tail = self.config.layers
        yield "head", _spec(head, "head", 0)
        for step, (idx, layer) in product(range(self.config.num_loop_steps), enumerate(stack)):
            pos = 1 + unrolled_position(step, idx, len(stack))
            yield f"loop_{idx}", _spec(layer, "loop", pos, step, idx)
        yield "tail", _spec(tail, "tail", 1 + self.config.num_loop_steps * len(stack))

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """Every visit that one forward records, in depth order."""
        return tuple(spec for _, spec in self.visits())

    def trace_meta(self) -> TraceMeta:
        """The TraceMeta of a forward of this model."""
        router = self.config.layers[1].moe.router
        return TraceMeta(
            num_stacks=self.config.num_loop_steps,
            num_layers_in_stack=self.config.num_layers_in_stack,
            num_experts=router.num_experts,
            num_active=router.top_k,
        )

    def aux_loss_factors(self) -> tuple[float, float]:
        """(factor of the load-balancing loss, factor of the router z-loss) in the objective."""
        return self.config.lb_loss_factor, self.config.z_loss_factor

    def loop_readout(self, h_BSD: Tensor, *, readout: str = "tail") -> Tensor:
        """Logits [B, S, V] from a state of the loop [B, S, d], as if the loop ended there.

        Args:
            h_BSD: the stack's output after some pass.
            readout: "tail" runs the tail layer first, "head" goes straight to the final norm and the head.
        """
        if readout == "tail":
            h_BSD = self.layers["tail"](h_BSD, None, None).h_BSD
        return cast(Tensor, self.lm_head(self.norm(h_BSD)))

    def loop_entry(self) -> nn.Module:
        """The module whose first argument is the loop's state: the stack's first block."""
        return cast(nn.Module, self.layers["loop_0"])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
        *,
        return_aux: bool = False,
    ) -> Tensor | LoopMoEOutput:
        """Token ids [B, S] → logits [B, S, V], or LoopMoEOutput with `return_aux=True`.

        This loop runs eagerly: it is the one place that records. Blocks always hand their router tensors back;
        here they go to the armed sink or are dropped. The sink is read only here, never inside a block that
        may be compiled.
        """
        h_BSD = self.tok_embeddings(tokens)
        aux_losses: list[tuple[Tensor, Tensor]] = []
        for name, visit in self.visits():
            out: BlockOutput = self.layers[name](h_BSD, attention_masks, positions)
            h_BSD = out.h_BSD
            aux_losses.append((out.lb_loss, out.z_loss))
            if ACTIVE_TRACE_SINK.armed:
                ACTIVE_TRACE_SINK.record(_trace_point(visit, out))
            # Nothing here may keep the last visit's router tensors alive through the head and the backward.
            del out
        h_BSD = self.norm(h_BSD)
        output: Tensor = h_BSD if self._skip_lm_head else self.lm_head(h_BSD)
        if not return_aux:
            return output
        return LoopMoEOutput(
            output, *(torch.stack(losses).mean() for losses in zip(*aux_losses, strict=True))
        )


def _spec(layer: LoopMoEBlock.Config, block: Any, pos: int, step: int = 0, idx: int = 0) -> VisitSpec:
    router = layer.moe.router
    return VisitSpec(
        block=block,
        unrolled_pos=pos,
        loop_step=step,
        layer_idx=idx,
        num_experts=router.num_experts,
        top_k=router.top_k,
    )


def _trace_point(visit: VisitSpec, out: BlockOutput) -> TracePoint:
    return TracePoint(
        block=visit.block,
        unrolled_pos=visit.unrolled_pos,
        loop_step=visit.loop_step,
        layer_idx=visit.layer_idx,
        num_experts=out.logits_BSE.shape[-1],
        top_k=out.topk_idx_BSK.shape[-1],
        router_logits=out.logits_BSE,
        router_probs=out.probs_BSE,
        topk_idx=out.topk_idx_BSK,
        topk_weights=out.topk_weights_BSK,
        residual=out.h_BSD.detach(),
    )


def _block_flops(layer: LoopMoEBlock.Config, dim: int, seq_len: int) -> int:
    # 6 FLOPs per parameter and token (2 forward, 4 backward); attention adds 6·heads·(2·head_dim)·seq_len.
    attention = layer.attention
    assert isinstance(attention, GQAttention.Config)
    head_dim = attention.head_dim or dim // attention.n_heads
    qkvo = dim * head_dim * 2 * (attention.n_heads + (attention.n_kv_heads or attention.n_heads))
    router, experts = layer.moe.router, layer.moe.routed_experts.inner_experts
    active = qkvo + dim * router.num_experts + router.top_k * 3 * dim * experts.hidden_dim
    return cast(int, 6 * active + 6 * attention.n_heads * 2 * head_dim * seq_len)
