"""Named sizes of the reference model."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.protocols.model_spec import ModelSpec

from loopscope.errors import ConfigError
from loopscope.models.cpu_compat import init_like_unsharded
from loopscope.models.loopmoe.block import LoopMoEBlock, LoopMoELayer
from loopscope.models.loopmoe.experts import LoopGroupedExperts
from loopscope.models.loopmoe.model import LoopMoEModel
from loopscope.models.loopmoe.parallelize import parallelize_loopmoe
from loopscope.models.loopmoe.router import LoopRouter, RouterGate

AttentionBackend = Literal["sdpa", "flex"]


@dataclass(frozen=True, kw_only=True)
class LoopMoEShape:
    """Everything that tells one flavour from another."""

    dim: int
    """Model width d."""
    num_heads: int
    """Attention heads."""
    expert_hidden_dim: int
    """Hidden width of one expert."""
    num_loop_steps: int
    """R."""
    num_layers_in_stack: int
    """L."""
    loop_num_experts: int
    """E of the stack's layers."""
    loop_top_k: int
    """k of the stack's layers."""
    edge_num_experts: int
    """E of head and tail."""
    edge_top_k: int
    """k of head and tail."""
    vocab_size: int = 2048
    """Entries of embedding and head; at least the tokenizer's."""
    max_seq_len: int = 4096
    """Longest sequence that RoPE's cache covers."""
    dropout: float = 0.0
    """Residual dropout of every block."""
    lb_loss_factor: float = 0.01
    """Factor of the load-balancing loss."""
    z_loss_factor: float = 0.001
    """Factor of the router z-loss."""
    attention: AttentionBackend = "sdpa"
    """"sdpa" attends across packed documents and runs anywhere; "flex" masks per document and needs a GPU."""

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        for name in ("num_loop_steps", "num_layers_in_stack"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected >= 1")
        for part, experts, top_k in (
            ("loop", self.loop_num_experts, self.loop_top_k),
            ("edge", self.edge_num_experts, self.edge_top_k),
        ):
            if not 1 <= top_k <= experts:
                raise ConfigError(
                    f"{part}_top_k is {top_k} with {part}_num_experts {experts}; expected 1 <= top_k <= num_experts"
                )
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(
                f"dim is {self.dim} with num_heads {self.num_heads}; expected an even number per head, which RoPE needs"
            )

    @property
    def num_visits(self) -> int:
        """Head + R·L + tail."""
        return 2 + self.num_loop_steps * self.num_layers_in_stack


FLAVORS: dict[str, LoopMoEShape] = {
    # Trains on two CPU cores.
    "debug": LoopMoEShape(
        dim=128,
        num_heads=4,
        expert_hidden_dim=128,
        num_loop_steps=3,
        num_layers_in_stack=2,
        loop_num_experts=16,
        loop_top_k=2,
        edge_num_experts=8,
        edge_top_k=2,
        # So few tokens a step would collapse the routers under the usual 0.01 before the loss takes hold.
        lb_loss_factor=0.1,
    ),
    # The shape at which the cost of tracing is measured.
    "wide": LoopMoEShape(
        dim=512,
        num_heads=8,
        expert_hidden_dim=512,
        num_loop_steps=4,
        num_layers_in_stack=4,
        loop_num_experts=64,
        loop_top_k=8,
        edge_num_experts=16,
        edge_top_k=2,
    ),
}


def model_registry(flavor: str, **changes: object) -> ModelSpec:
    """torchtitan's ModelSpec of a flavour; `changes` replace fields of its LoopMoEShape.

    Raises:
        ConfigError: unknown flavour or field, or a shape that cannot be built.
    """
    if flavor not in FLAVORS:
        raise ConfigError(f"flavour is {flavor!r}, expected one of {', '.join(sorted(FLAVORS))}")
    fields = {f.name for f in dataclasses.fields(LoopMoEShape)}
    if unknown := sorted(set(changes) - fields):
        raise ConfigError(
            f"LoopMoEShape has no field {', '.join(unknown)}; its fields are {', '.join(sorted(fields))}"
        )
    return ModelSpec(
        name="loopmoe",
        flavor=flavor,
        model=build_config(dataclasses.replace(FLAVORS[flavor], **changes)),  # type: ignore[arg-type]
        parallelize_fn=parallelize_loopmoe,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def build_config(shape: LoopMoEShape) -> LoopMoEModel.Config:
    """The model configuration of a shape."""
    init = {"weight": _normal(0.02)}
    edge = partial(_block, shape, shape.edge_num_experts, shape.edge_top_k)
    loop = partial(_block, shape, shape.loop_num_experts, shape.loop_top_k)
    return LoopMoEModel.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=dict(init)
        ),
        norm=_norm(shape.dim),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=dict(init)),
        layers=[edge(), *(loop() for _ in range(shape.num_layers_in_stack)), edge()],
        num_loop_steps=shape.num_loop_steps,
        lb_loss_factor=shape.lb_loss_factor,
        z_loss_factor=shape.z_loss_factor,
    )


def _normal(std: float) -> Callable[[Tensor], None]:
    return init_like_unsharded(partial(nn.init.normal_, std=std))


def _norm(dim: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=1e-6, param_init={"weight": nn.init.ones_})


def _block(shape: LoopMoEShape, num_experts: int, top_k: int) -> LoopMoEBlock.Config:
    inner = {"weight": _normal(0.02)}
    # Residual outputs start smaller the more visits add to the stream (Megatron's scaled initializer).
    outer = {"weight": _normal(0.02 / math.sqrt(2 * shape.num_visits))}
    head_dim = shape.dim // shape.num_heads
    return LoopMoEBlock.Config(
        dropout=shape.dropout,
        attention_norm=_norm(shape.dim),
        ffn_norm=_norm(shape.dim),
        attention=make_gqa_config(
            dim=shape.dim,
            n_heads=shape.num_heads,
            head_dim=head_dim,
            wqkv_param_init=inner,
            wo_param_init=outer,
            inner_attention=(
                ScaledDotProductAttention.Config() if shape.attention == "sdpa" else FlexAttention.Config()
            ),
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=shape.max_seq_len),
        ),
        moe=LoopMoELayer.Config(
            router=LoopRouter.Config(
                num_experts=num_experts,
                top_k=top_k,
                gate=RouterGate.Config(
                    in_features=shape.dim, out_features=num_experts, param_init=dict(inner)
                ),
            ),
            routed_experts=RoutedExperts.Config(
                inner_experts=LoopGroupedExperts.Config(
                    dim=shape.dim,
                    hidden_dim=shape.expert_hidden_dim,
                    num_experts=num_experts,
                    param_init={
                        "w1_EFD": inner["weight"],
                        "w2_EDF": outer["weight"],
                        "w3_EFD": inner["weight"],
                    },
                ),
                token_dispatcher=LocalTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
            ),
        ),
    )
