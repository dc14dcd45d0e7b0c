"""The models that are drawn: reviewed families of transformers, every other one of its families, and a looped one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # family_models is a module of `lib` elsewhere

VOCABULARY, WIDTH = 64, 32

BASE: Mapping[str, Any] = {
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
    packs: bool = True
    """Positions that begin again are sequences of their own."""


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

REVIEWED: Mapping[str, Family] = {
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
        packs=False,
    ),
}
"""Name → how it is built, with random options."""

OTHERS = (
    "afmoe", "aria", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "dbrx", "deepseek_ocr2", "deepseek_v2",
    "deepseek_v32", "deepseek_v4", "diffusion_gemma", "dots1", "dots3_note", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "flint", "gemma4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl", "inkling",
    "inkling2", "inkling2_loop", "jamba", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4",
    "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "mistral4", "mistral_large4",
    "muse_spark", "nemotron_h", "openai_privacy_filter", "qwen3_5_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe",
    "qwen4_exp", "solar_open", "step3p7", "unlimited_ocr",
)  # fmt: skip
"""Families of transformers whose sizes are those of `scripts/bench families`: their rows are compared in order."""

LOOPED = "looped"
KINDS = (*REVIEWED, *OTHERS, LOOPED)


class Experts(nn.Module):
    """Every expert on every token, weighed: what is compared is who was asked, not how quickly."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        every = torch.einsum("nd,edf->nef", hidden, self.weight)
        chosen = every.gather(1, idx[..., None].expand(*idx.shape, WIDTH))
        return (chosen * weights[..., None].to(chosen.dtype)).sum(1)


class Mixture(nn.Module):
    """A router that keeps its choice to itself."""

    def __init__(self, num_experts: int, top_k: int, score: str, biased: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, num_experts, bias=False), Experts(num_experts)
        self.register_buffer("correction_bias", torch.randn(num_experts) * 0.2 if biased else None)
        self.top_k, self.score = top_k, score

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x).flatten(0, 1)
        scores = logits.float().softmax(-1) if self.score == "softmax" else logits.float().sigmoid()
        by = scores if self.correction_bias is None else scores + self.correction_bias
        idx = by.topk(self.top_k, -1).indices
        weights = scores.gather(-1, idx)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(x.flatten(0, 1), idx, weights).view_as(x)


class Layer(nn.Module):
    """Mixes over the sequence, then over experts."""

    def __init__(self, *options: Any) -> None:
        super().__init__()
        self.norm, self.mix, self.moe = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Mixture(*options)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        share = (visible / visible.sum(-1, keepdim=True).clamp_min(1)).to(x.dtype)
        x = x + share @ self.mix(x)
        return x + self.moe(self.norm(x))


class Looped(nn.Module):
    """A prelude, two layers that run again and again, a coda."""

    def __init__(self, num_experts: int, top_k: int, score: str, biased: bool, most: int) -> None:
        super().__init__()
        options = (num_experts, top_k, score, biased)
        self.most = most
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.prelude, self.coda = Layer(*options), Layer(*options)
        self.core = nn.ModuleList([Layer(*options), Layer(*options)])
        self.recomputed: bool | None = None
        """How layers are recomputed: reentrant or not; None: they are not."""

    def run(self, layer: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        """Call a layer, recomputed or not."""
        if self.recomputed is None:
            return layer(*args)
        return torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=self.recomputed)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, passes: int = 1
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None]
        x = self.run(self.prelude, self.embed(input_ids), visible)
        for _ in range(passes):
            for layer in self.core:
                x = self.run(layer, x, visible)
        return self.head(self.run(self.coda, x, visible))


def looped_plan(model: Looped) -> dict[str, Any]:
    """What a stranger would write."""
    mixture = model.prelude.moe
    here = {"placements": {}, "merge": "sum"}
    block = {**here, "tensors": {"residual": "output"}}
    tensors = {"router_logits": "local.logits", "topk_idx": "local.idx", "topk_weights": "local.weights"}
    biased = mixture.correction_bias is not None
    routing = {
        "num_experts": mixture.gate.out_features,
        "top_k": mixture.top_k,
        "score_func": mixture.score,
        "order": "score_then_topk",
        "normalised": True,
        "balancing": "probability_bias" if biased else "none",
    }
    if biased:
        tensors["expert_bias"] = "module.correction_bias"
    return {
        "prelude": block,
        "core.?": {**block, "calls": model.most},
        "coda": block,
        "*.moe": {**here, "tensors": tensors, "routing": routing},
    }


def drawn_options(family: str, dice: random.Random) -> dict[str, Any]:
    """What is random in a family's configuration."""
    if family in REVIEWED:
        options = {"num_hidden_layers": dice.choice((1, 2, 3)), **REVIEWED[family].draw(dice)}
        fewest = options.get("decoder_sparse_step", 1)  # with less there is no expert at all
        return {**options, "num_hidden_layers": max(fewest, options["num_hidden_layers"])}
    if family == LOOPED:
        experts = dice.choice((4, 8))
        return {"num_experts": experts, "top_k": dice.randint(1, 3), "score": dice.choice(("softmax", "sigmoid")),
                "biased": dice.random() < 0.5, "most": dice.choice((2, 4))}  # fmt: skip
    return {}


def build_family(family: str, options: Mapping[str, Any]) -> Any:
    """The model in float32; the caller has seeded."""
    if family in OTHERS:
        from lib.family_models import build

        return build(family, **options)
    if family == LOOPED:
        model = Looped(**options)
    else:
        known = REVIEWED[family]
        sizes = {**BASE, **known.fixed, **options}
        config = getattr(hf, known.config)(
            **{name: sizes[name] for name in sizes if name not in known.without}
        )
        # Attention sinks are in transformers' eager attention alone.
        config._attn_implementation = "eager" if family == "gpt_oss" else "sdpa"
        model = getattr(hf, known.model)(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (
                "correction_bias" in name
                or name.endswith("router.bias")
                or (tensor.ndim > 1 and isinstance(tensor, nn.Parameter))
            ):
                nn.init.normal_(tensor, std=0.2)
    return model
