"""Random trainings of small transformers MoEs: what is drawn, and how its model and its batches are built.

Everything of a configuration follows from the seed and its number alone, so that one can be run again by its number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers as hf

VOCABULARY, WIDTH, STEPS = 64, 32, 4
DTYPES = ("fp32", "bf16", "autocast", "fp16")
MASKS = ("none", "right", "left", "4d-right", "4d-left")
CHECKPOINTS = ("none", "model", "layers-reentrant", "layers")
TOLD = ("counted", "begin_step", "begin_step and number")

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training."""

    number: int
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the model's own configuration."""
    dtype: str = "fp32"
    mask: str = "none"
    microbatches: tuple[int, ...] = (1,) * STEPS
    """Forwards of each step."""
    told: str = "counted"
    """How loopscope learns which step a forward belongs to."""
    checkpoint: str = "none"
    ranks: int = 1
    ddp: bool = False
    """Gradients of two ranks by DistributedDataParallel; else by an all-reduce in the loop."""
    evaluates: bool = False
    """An evaluation forward between two steps."""
    fails: bool = False
    """One forward raises after its last layer, and the loop tries again."""
    batch: tuple[int, int] = (2, 12)
    """B, S."""

    def __str__(self) -> str:
        default = Configuration(number=0, family="")
        said = {k: v for k, v in asdict(self).items() if v != getattr(default, k)}
        return f"#{said.pop('number', 0)} {said.pop('family')} " + " ".join(
            f"{k}={v}" for k, v in said.items()
        )


def drawn(number: int, seed: int, families: tuple[str, ...] = ()) -> Configuration:
    """Configuration `number` of `seed`."""
    dice = random.Random(f"{seed}/{number}")
    family = dice.choice(families or tuple(FAMILIES))
    told = dice.choice(TOLD)
    count = dice.choice((1, 1, 2, 3))
    counts = tuple(dice.choice((1, 2, 3)) for _ in range(STEPS))
    mask = dice.choice(MASKS)
    options = {"num_hidden_layers": dice.choice((1, 2, 3)), **FAMILIES[family].draw(dice)}
    if mask.startswith("4d"):  # transformers' balancing loss reads masks [B, S] alone
        options.pop("output_router_logits", None)
    ranks = 2 if dice.random() < 0.2 else 1
    checkpoint = dice.choice(CHECKPOINTS if FAMILIES[family].recomputes else ("none", "model"))
    return Configuration(
        number=number,
        family=family,
        options=options,
        dtype=dice.choice(DTYPES),
        mask=mask,
        microbatches=(count,) * STEPS if told == "counted" else counts,
        told=told,
        checkpoint=checkpoint,
        ranks=ranks,
        # DistributedDataParallel refuses parameters whose gradient a reentrant recompute makes twice.
        ddp=dice.random() < 0.5 and ranks == 2 and checkpoint in ("none", "layers"),
        evaluates=dice.random() < 0.3,
        fails=dice.random() < 0.15,
        batch=(dice.choice((1, 2, 3)), dice.choice((5, 12, 17))),
    )


def build(configuration: Configuration) -> Any:
    """The model, with random weights that depend on the number alone, in training mode."""
    torch.manual_seed(configuration.number)
    family = FAMILIES[configuration.family]
    options = {**_BASE, **family.fixed, **configuration.options}
    config = getattr(hf, family.config)(**{key: options[key] for key in options if key not in family.without})
    # Attention sinks are in transformers' eager attention alone.
    attention = "eager" if configuration.family == "gpt_oss" else "sdpa"
    config._attn_implementation = attention
    model = getattr(hf, family.model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("router.bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    if configuration.dtype in ("bf16", "fp16"):
        model = model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[configuration.dtype])
    if configuration.checkpoint.startswith("layers"):
        reentrant = configuration.checkpoint == "layers-reentrant"
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward, and which of its tokens are no padding ([B, S] bool)."""

    arguments: Mapping[str, torch.Tensor]
    valid: torch.Tensor


def batches(configuration: Configuration, rank: int) -> list[list[Batch]]:
    """Every batch of a rank, by step and microbatch."""
    generator = torch.Generator().manual_seed(configuration.number * 2 + rank)
    return [[_batch(configuration, generator) for _ in range(n)] for n in configuration.microbatches]


def _batch(configuration: Configuration, generator: torch.Generator) -> Batch:
    size, length = configuration.batch
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    valid = torch.ones(size, length, dtype=torch.bool)
    if configuration.mask != "none":
        padding = torch.randint(0, length - 1, (size,), generator=generator)
        at = torch.arange(length)
        left = configuration.mask.endswith("left")
        valid = at >= padding[:, None] if left else at < length - padding[:, None]
    arguments = {"input_ids": ids, "labels": ids.masked_fill(~valid, -100)}
    if configuration.mask in ("right", "left"):
        arguments["attention_mask"] = valid.long()
    elif configuration.mask.startswith("4d"):
        arguments["attention_mask"] = _square(configuration, valid)
    return Batch(arguments, valid)


def _square(configuration: Configuration, valid: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S]: causal, padding seen by nobody but itself; bool, or additive for eager attention."""
    length = valid.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & valid[:, None, :]
    seen = (seen | torch.eye(length, dtype=torch.bool))[:, None]
    if configuration.family != "gpt_oss":
        return seen
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(configuration.dtype, torch.float32)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Family:
    """A model of transformers."""

    config: str
    model: str
    draw: Callable[[random.Random], dict[str, Any]]
    """What is random in its configuration."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Options of all families that this one does not have."""
    recomputes: bool = True
    """transformers can recompute its layers."""


def _experts(name: str, **more: tuple[Any, ...]) -> Callable[[random.Random], dict[str, Any]]:
    """E and k, and one of the values of each further option."""

    def draw(dice: random.Random) -> dict[str, Any]:
        experts = dice.choice((4, 8, 16))
        options = {option: dice.choice(values) for option, values in more.items()}
        return {name: experts, "num_experts_per_tok": dice.randint(1, min(experts, 5)), **options}

    return draw


def _deepseek(dice: random.Random) -> dict[str, Any]:
    experts, groups = dice.choice((8, 16)), dice.choice((1, 2, 4))
    chosen = dice.randint(1, groups)
    return {
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": dice.randint(1, min(4, experts // groups * chosen)),
        "norm_topk_prob": dice.random() < 0.5,
        "routed_scaling_factor": dice.choice((1.0, 2.5)),
        "first_k_dense_replace": dice.choice((0, 0, 1)),
        "attention_dropout": dice.choice((0.0, 0.1)),
    }


_DROPOUT, _YES_NO = (0.0, 0.1), (False, True)

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        _experts(
            "num_local_experts",
            router_jitter_noise=(0.0, 0.0, 0.05),
            attention_dropout=_DROPOUT,
            output_router_logits=_YES_NO,
        ),
    ),
    "olmoe": Family(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        _experts(
            "num_experts", norm_topk_prob=_YES_NO, attention_dropout=_DROPOUT, output_router_logits=_YES_NO
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _experts(
            "num_experts", norm_topk_prob=_YES_NO, decoder_sparse_step=(1, 2), output_router_logits=_YES_NO
        ),
        {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 2},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _experts(
            "num_experts", norm_topk_prob=_YES_NO, attention_dropout=_DROPOUT, output_router_logits=_YES_NO
        ),
        {"moe_intermediate_size": 16, "head_dim": 8},
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _deepseek,
        {**_LATENT, "moe_intermediate_size": 16, "n_shared_experts": 1, "num_key_value_heads": 4},
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        _experts("num_local_experts", attention_dropout=_DROPOUT, output_router_logits=_YES_NO),
        {"head_dim": 8},
    ),
    "jetmoe": Family(
        "JetMoeConfig",
        "JetMoeForCausalLM",
        _experts("num_local_experts", attention_dropout=_DROPOUT, output_router_logits=_YES_NO),
        {"kv_channels": 8, "intermediate_size": 16},
        without=("num_attention_heads",),
        recomputes=False,
    ),
}
"""Name → how it is built; what attach does not know it refuses, which is counted, and is no fault."""
