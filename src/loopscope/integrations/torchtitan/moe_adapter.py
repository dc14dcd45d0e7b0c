"""torchtitan's own MoE models (deepseek_v3, qwen3, gpt_oss, ...), observed through hooks.

With torchtitan's own trainer::

    trainer = config.build()
    with loopscope.attach(trainer.model_parts[0], out=RUN, num_microbatches=trainer.gradient_accumulation_steps):
        trainer.train()

`LoopscopeTrainer` calls `observe` on such a model, which gives it the trace contract.
"""

import re
from typing import Any

from torch import nn
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

from loopscope.capture.errors import PlanError
from loopscope.capture.plan_adapter import plan_of_layers
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.runtime import ForwardObserver
from loopscope.capture.spec import CapturePlan, CaptureSpec
from loopscope.capture.torch_base import TorchModelAdapter

_LAYER = re.compile(r"layers\.([^.]+)")
_ROUTER = {"topk_weights": "output[0]", "topk_idx": "output[1]", "router_probs": "output[2]"}


class TorchtitanAdapter(TorchModelAdapter):
    """A torchtitan model with `layers`. Modules are found by their class: sharding and recompute rename them."""

    def derive(self) -> CapturePlan:
        """One block per layer, dense ones included; logits from the gate, the choice from the router.

        Raises:
            CoverageError: no layer has a MoE, or the MoE layers are not those that the configuration declares.
            PlanError: a router of a class whose outputs are not known.
        """
        modules = self.modules()

        def moes_of(layer: str) -> dict[str, dict[str, CaptureSpec]]:
            return {
                name: _boundaries(name, part)
                for name, part in modules.items()
                if name.startswith(layer + ".") and isinstance(part, MoE)
            }

        return plan_of_layers(
            self.model,
            [(name, int(found[1]), "output") for name in modules if (found := _LAYER.fullmatch(name))],
            moes_of,
            lambda: _declared(self.model),
        )


def observe(model: nn.Module) -> ForwardObserver:
    """Give a torchtitan MoE model the trace contract: it records its visits whenever the sink is armed.

    `expected_visits` and `trace_meta` become attributes of the model.

    Raises:
        CoverageError, PlanError: as `TorchtitanAdapter.derive`.
    """
    adapter = TorchtitanAdapter(model)
    visits, meta = adapter.expected_visits(), adapter.promised_meta()
    # Plain attributes, not submodules: nothing about the model's state or its names changes.
    model.expected_visits = lambda: visits  # type: ignore[assignment]
    model.trace_meta = lambda: meta  # type: ignore[assignment]
    nothing: Any = lambda *_: None  # noqa: E731
    return ForwardObserver(
        adapter, wanted=lambda: False, deliver=nothing, ended=nothing, failed=nothing, broken=nothing
    )


def is_torchtitan_moe(model: nn.Module) -> bool:
    """True for a model with torchtitan's MoE layers and without the trace contract."""
    return not callable(getattr(model, "expected_visits", None)) and any(
        isinstance(part, MoE) for part in model.modules()
    )


def routing_of(moe: Any) -> RoutingSpec:
    """The routing of one MoE module, from its own attributes."""
    router = moe.router
    return RoutingSpec(
        num_experts=int(router.num_experts),
        top_k=int(router.top_k),
        score_func=router.score_func,
        order="score_then_topk",
        normalised=bool(router.route_norm),
        # Without a coefficient nothing in torchtitan balances, but a loss outside the model may.
        balancing="unknown" if moe.load_balance_coeff is None else "probability_bias",
        gate_bias=router.gate.bias is not None,
        route_scale=float(router.route_scale),
        num_groups=router.num_expert_groups,
        groups_per_token=router.num_limited_groups,
        shared_experts=0 if moe.shared_experts is None else 1,
        forced_balance=bool(router._debug_force_load_balance),
        sources={
            "num_experts": "router.num_experts",
            "top_k": "router.top_k",
            "score_func": "router.score_func",
            "normalised": "router.route_norm",
            "balancing": "moe.load_balance_coeff",
            "gate_bias": "router.gate.bias",
            "route_scale": "router.route_scale",
            "num_groups": "router.num_expert_groups",
            "groups_per_token": "router.num_limited_groups",
            "shared_experts": "moe.shared_experts",
            "forced_balance": "router._debug_force_load_balance",
        },
    )


def _boundaries(name: str, moe: Any) -> dict[str, CaptureSpec]:
    if type(moe.router).forward is not TokenChoiceTopKRouter.forward:
        raise PlanError(
            f"{name}.router is a {type(moe.router).__name__} with a forward of its own, expected torchtitan's "
            "TokenChoiceTopKRouter. Use backend='torch' with a capture plan that says what it returns."
        )
    bias = {"expert_bias": "input[1]"} if moe.load_balance_coeff is not None else {}
    return {
        f"{name}.router": CaptureSpec(tensors={**_ROUTER, **bias}, routing=routing_of(moe)),
        f"{name}.router.gate": CaptureSpec(tensors={"router_logits": "output"}),
    }


def _declared(model: Any) -> tuple[int, ...] | None:
    """Numbers of the layers whose configuration has a MoE; None where the model keeps no such list."""
    layers = getattr(getattr(model, "config", None), "layers", None)
    if layers is None:
        return None
    return tuple(number for number, layer in enumerate(layers) if getattr(layer, "moe", None) is not None)
