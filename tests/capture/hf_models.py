"""Small transformers MoEs with random weights; no download."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8
}  # fmt: skip


def _mixtral() -> Any:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )


def _olmoe() -> Any:
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**BASE, num_experts=8, num_experts_per_tok=3))


def _qwen3() -> Any:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **BASE, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1],
            norm_topk_prob=True, output_router_logits=True,
        )
    )  # fmt: skip


def _qwen2() -> Any:
    return hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **BASE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
            decoder_sparse_step=2,
        )
    )  # fmt: skip


def _deepseek() -> Any:
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**BASE, "num_key_value_heads": 4}, **LATENT, moe_intermediate_size=16, n_routed_experts=8,
            num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1, n_shared_experts=1,
        )
    )  # fmt: skip


def _gpt_oss() -> Any:
    config = hf.GptOssConfig(**BASE, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    return hf.GptOssForCausalLM(config)


def _jetmoe() -> Any:
    return hf.JetMoeForCausalLM(
        hf.JetMoeConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=3, num_key_value_heads=2, kv_channels=8,
            intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


FAMILIES = {
    "mixtral": (_mixtral, (0, 1, 2)),
    "olmoe": (_olmoe, (0, 1, 2)),
    "qwen3_moe": (_qwen3, (0, 2)),
    "qwen2_moe": (_qwen2, (1,)),
    "deepseek_v3": (_deepseek, (1, 2)),
    "gpt_oss": (_gpt_oss, (0, 1, 2)),
    "jetmoe": (_jetmoe, (0, 1, 2)),
}
"""name → (builder, MoE layers by physical number)."""


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[name][0]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 or parameter_name.endswith("router.bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    return model
