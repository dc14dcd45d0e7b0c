"""One small random model of every MoE family that transformers ships, of a few thousand to a few million numbers."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "moe_top_k": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "q_lora_rank": 16,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "tie_word_embeddings": False,
    "use_cache": False, "sliding_window": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_layers": 2,
    "num_decoder_layers": 2,
}  # fmt: skip
"""Sizes by the names that configurations give them."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SAME_HEADS = {"num_key_value_heads": 4}
_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
OTHERWISE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
         "mistral_large4"),
        _SAME_HEADS,
    ),
    "dbrx": {
        "n_heads": 4, "n_layers": 3, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dots3_note": {**_SAME_HEADS, **_INDEXER, "shared_experts_intermediate_size": 16},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "gemma4": {"enable_moe_block": True, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
               "global_head_dim": 8},
    "glm4v_moe": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0]}},
    "glm5_next": {**_SAME_HEADS, **_INDEXER, "qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 8,
                  "linear_num_heads": 4, "index_kpool": 2},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hy_v4_vl": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "inkling2_loop": {
        "num_hidden_layers": 6, "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2,
        "loop_layer_index_end": 4, "loop_num_passes": 3, "loop_gate_rank": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "mistral4": {**_SAME_HEADS, "head_dim": 16},
    "nllb_moe": {
        "encoder_sparse_step": 1, "decoder_sparse_step": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    },
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 2, "hc_lowrank": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "ple_embed_dim": 8,
    },
    "switch_transformers": {
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "d_kv": 8, "d_ff": 48, "num_heads": 4
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a family needs otherwise."""

TEXT_ONLY = {"dots3_note": "Dots3NoteTextModel", "diffusion_gemma": "DiffusionGemmaEncoderTextModel"}
"""Families whose head is built for more than text."""
_CLASSES = ("ForCausalLM$", "TextModel$", "ForConditionalGeneration$", "ForTokenClassification$", "Model$")


def families() -> list[str]:
    """Names of the families whose modelling file has experts, by what their files say."""
    root = Path(transformers.__file__).parent / "models"
    has_experts = re.compile(r"^class \w*(Experts|CDMoE)\(", re.MULTILINE)
    return [
        path.parent.name
        for path in sorted(root.glob("*/modeling_*.py"))
        if path.stem == f"modeling_{path.parent.name}"
        and has_experts.search(path.read_text(encoding="utf-8"))
    ]


def model_class(family: str) -> Any:
    """The family's language model: with a head where it has one."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family in TEXT_ONLY:
        return getattr(module, TEXT_ONLY[family])
    classes = {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, transformers.PreTrainedModel)
        and kind.__module__ == module.__name__
        and "PreTrained" not in name
        and "Encoder" not in name
    }
    return next(kind for end in _CLASSES for name, kind in classes.items() if re.search(end, name))


def build(family: str, **otherwise: Any) -> Any:
    """A model with numbers of moderate size everywhere, the biases of the choice included."""
    kind = model_class(family)
    known = vars(kind.config_class()).keys() | set(dir(kind.config_class))
    sizes = {name: value for name, value in SMALL.items() if name in known}
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**sizes, **OTHERWISE.get(family, {}), **otherwise}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if re.search(r"correction_bias|expert_bias|balancing_biases", name):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model
