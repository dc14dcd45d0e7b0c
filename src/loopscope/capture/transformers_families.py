"""The routers of transformers, class by class: what their outputs are, and how their configuration is read.

Keyed by the exact class that the model itself declares in `_can_record_outputs`, never by a part of a name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from loopscope.capture.routing import RoutingSpec
from loopscope.capture.source import Call, decoder

_TUPLE = {"router_logits": "output[0]", "topk_weights": "output[1]", "topk_idx": "output[2]"}


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """How to read one router class."""

    tensors: Mapping[str, str]
    """Tensor name → source."""
    routing: Callable[[Any], RoutingSpec]
    """Its routing, from the configuration."""
    is_moe: Callable[[Any, int], bool]
    """(config, physical layer number) → whether the configuration declares a MoE layer there."""
    aux_coef: str | None
    """Name of the configuration's factor of the auxiliary loss; None where the model computes none."""
    within: str | None = None
    """Child of the layer that holds its router, where a layer has several."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What is left out."""


def _every(config: Any, layer: int) -> bool:
    return True


def _qwen(config: Any, layer: int) -> bool:
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0


def _deepseek_layers(config: Any, layer: int) -> bool:
    return bool(layer >= config.first_k_dense_replace)


def _balancing(config: Any, coefficient: str) -> str:
    return "auxiliary_loss" if config.output_router_logits and getattr(config, coefficient) else "none"


def _softmax(
    *, experts: str, normalised: str | bool, coefficient: str = "router_aux_loss_coef", shared: int = 0
) -> Callable[[Any], RoutingSpec]:
    def read(config: Any) -> RoutingSpec:
        return RoutingSpec(
            num_experts=getattr(config, experts),
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            order="score_then_topk",
            normalised=bool(getattr(config, normalised)) if isinstance(normalised, str) else normalised,
            balancing=_balancing(config, coefficient),  # type: ignore[arg-type]
            shared_experts=shared,
            sources={
                "num_experts": f"config.{experts}",
                "top_k": "config.num_experts_per_tok",
                "normalised": f"config.{normalised}"
                if isinstance(normalised, str)
                else "the router's forward",
                "score_func": "the router's forward",
                "order": "the router's forward",
                "balancing": f"config.output_router_logits, config.{coefficient}",
            },
        )

    return read


def _topk_first(*, gate_bias: bool, coefficient: str) -> Callable[[Any], RoutingSpec]:
    def read(config: Any) -> RoutingSpec:
        return RoutingSpec(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            order="topk_then_score",
            normalised=True,
            gate_bias=gate_bias,
            balancing=_balancing(config, coefficient),  # type: ignore[arg-type]
            sources={
                "num_experts": "config.num_local_experts",
                "top_k": "config.num_experts_per_tok",
                "order": "the router's forward",
                "gate_bias": "the router's parameters",
                "balancing": f"config.output_router_logits, config.{coefficient}",
            },
        )

    return read


def _deepseek(config: Any) -> RoutingSpec:
    return RoutingSpec(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        score_func="sigmoid",
        order="score_then_topk",
        normalised=bool(config.norm_topk_prob),
        balancing="probability_bias",
        route_scale=float(config.routed_scaling_factor),
        num_groups=config.n_group,
        groups_per_token=config.topk_group,
        shared_experts=config.n_shared_experts,
        sources={
            "num_experts": "config.n_routed_experts",
            "top_k": "config.num_experts_per_tok",
            "normalised": "config.norm_topk_prob",
            "score_func": "the router's forward",
            "balancing": "the router's e_score_correction_bias",
            "route_scale": "config.routed_scaling_factor",
            "num_groups": "config.n_group",
            "groups_per_token": "config.topk_group",
            "shared_experts": "config.n_shared_experts",
        },
    )


def jetmoe_idx(call: Call) -> torch.Tensor:
    """[N, k] experts used, from what the gating returns: the sorted order of all assignments and their counts."""
    output = call.output
    counts = torch.as_tensor(output[3], device=output[0].device)
    return _unsorted(torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts), output)


def jetmoe_weights(call: Call) -> torch.Tensor:
    """[N, k] combine weights, put back from sorted order."""
    return _unsorted(call.output[2], call.output)


def _unsorted(values: torch.Tensor, output: Any) -> torch.Tensor:
    order, logits = output[0], output[4]
    flat = torch.empty_like(values)
    flat[order] = values
    return flat.reshape(logits.shape[0], -1)


for _function in (jetmoe_idx, jetmoe_weights):
    decoder(_function.__name__, recomputes=False)(_function)

FAMILIES: Mapping[str, RouterFamily] = {
    "MixtralTopKRouter": RouterFamily(
        _TUPLE, _softmax(experts="num_local_experts", normalised=True), _every, "router_aux_loss_coef"
    ),
    "OlmoeTopKRouter": RouterFamily(
        _TUPLE, _softmax(experts="num_experts", normalised="norm_topk_prob"), _every, "router_aux_loss_coef"
    ),
    "Qwen3MoeTopKRouter": RouterFamily(
        _TUPLE, _softmax(experts="num_experts", normalised="norm_topk_prob"), _qwen, "router_aux_loss_coef"
    ),
    "Qwen2MoeTopKRouter": RouterFamily(
        _TUPLE,
        _softmax(experts="num_experts", normalised="norm_topk_prob", shared=1),
        _qwen,
        "router_aux_loss_coef",
    ),
    "DeepseekV3TopkRouter": RouterFamily(
        {**_TUPLE, "expert_bias": "module.e_score_correction_bias"}, _deepseek, _deepseek_layers, None
    ),
    "GptOssTopKRouter": RouterFamily(
        _TUPLE,
        _topk_first(gate_bias=True, coefficient="router_aux_loss_coef"),
        _every,
        "router_aux_loss_coef",
    ),
    "JetMoeTopKGating": RouterFamily(
        {
            "router_logits": "output[4]",
            "topk_idx": "decode.jetmoe_idx",
            "topk_weights": "decode.jetmoe_weights",
        },
        _topk_first(gate_bias=False, coefficient="aux_loss_coef"),
        _every,
        "aux_loss_coef",
        within="mlp",
        notes=(
            "JetMoE routes its attention heads as well; those routers are not captured: a visit has one router",
        ),
    ),
}
"""Class name of a router → how to read it. Adding a family is one entry and one test."""
