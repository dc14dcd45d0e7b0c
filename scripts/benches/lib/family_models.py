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

_SAME_HEADS = {"num_key_value_heads": 4}
OTHERWISE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
         "mistral_large4", "glm5_next"),
        _SAME_HEADS,
    ),
    "mistral4": {**_SAME_HEADS, "head_dim": 16},
    "switch_transformers": {
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "d_kv": 8, "d_ff": 48, "num_heads": 4
    },
    "granitemoehybrid": {"mamba_n_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a family needs otherwise."""

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
