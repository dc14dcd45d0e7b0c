"""transformers' MoE models: reviewed families by what they declare, every other one by what its routers do."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

from loopscope.capture.adapter import LossParts
from loopscope.capture.objective import loss_parts
from loopscope.capture.plan_adapter import plan_of_layers
from loopscope.capture.spec import CapturePlan, CaptureSpec
from loopscope.capture.torch_base import TorchModelAdapter
from loopscope.capture.transformers_families import FAMILIES
from loopscope.capture.transformers_fitted import config_of, fitted_family, fitted_plan


class TransformersAdapter(TorchModelAdapter):
    """A `PreTrainedModel`. Padding comes from the forward's attention mask, the loss from its output."""

    objective = ("loss", "aux_loss", "lr")

    def derive(self) -> CapturePlan:
        """One block per decoder layer, dense ones included; one router per MoE layer.

        Raises:
            PlanError: nothing routes, or no one description explains how; leads to `loopscope.discover`.
            CoverageError: the routers that were found are not the MoE layers that the configuration declares.
        """
        modules = self.modules()
        backbone, declared = next(self._recorders(modules), ("", {}))
        family = FAMILIES.get(_target(declared["router_logits"]).__name__) if declared else None
        if family is None or _is_adapted(modules):
            return self._fitted(modules)
        self.family = family
        config: Any = modules[backbone].config
        self.config, self._top_k = config, int(config.num_experts_per_tok)
        router_class, layer_class = _target(declared["router_logits"]), _target(declared["hidden_states"])

        def within(prefix: str, kind: type[nn.Module]) -> list[str]:
            return [
                name for name, part in modules.items() if name.startswith(prefix) and isinstance(part, kind)
            ]

        layers = within(f"{backbone}." if backbone else "", layer_class)

        def routers_of(layer: str) -> dict[str, dict[str, CaptureSpec]]:
            return {
                name: {name: CaptureSpec(tensors=dict(family.tensors), routing=family.routing(self.config))}
                for name in within(
                    f"{layer}.{family.within}." if family.within else f"{layer}.", router_class
                )
            }

        return plan_of_layers(
            self.model,
            [(layer, number, _residual(modules[layer])) for number, layer in enumerate(layers)],
            routers_of,
            lambda: tuple(number for number in range(len(layers)) if family.is_moe(self.config, number)),
            notes=family.notes,
        )

    def _fitted(self, modules: Mapping[str, nn.Module]) -> CapturePlan:
        """A family that is not reviewed, or one that an adapter package has changed."""
        plan = fitted_plan(self.model, modules)
        router = next(name for name, spec in plan.items() if spec.routing is not None)
        routing = plan[router].routing
        assert routing is not None
        self._top_k = routing.top_k
        self.config = config_of(router, modules)
        self.family = fitted_family(self.config, modules)
        return plan

    def losses(self, kwargs: Mapping[str, Any], output: Any) -> LossParts | None:
        """Loss and auxiliary loss of the output."""
        return loss_parts(self.model, self.config, self.family.aux_coef, self._top_k, kwargs, output)

    def settings(self) -> Mapping[str, Any]:
        """Recompute shows in the layers' own flag."""
        if any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
            return {**super().settings(), "recompute": True}
        return super().settings()

    def _recorders(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(name, declaration) of the inner models that declare a router, innermost backbone first."""
        named = [(name, part) for name, part in modules.items() if hasattr(part, "config")]
        for name, part in sorted(named, key=lambda item: -len(item[0])):
            declared = getattr(part, "_can_record_outputs", None) or {}
            if "router_logits" in declared and "hidden_states" in declared:
                yield name, declared


def _target(declared: Any) -> type[nn.Module]:
    first = declared[0] if isinstance(declared, (list, tuple)) else declared
    return cast(type[nn.Module], getattr(first, "target_class", first))


def _is_adapted(modules: Mapping[str, nn.Module]) -> bool:
    """True where PEFT has put modules of its own between those of the model."""
    return any(type(part).__module__.partition(".")[0] == "peft" for part in modules.values())


def _residual(layer: nn.Module) -> str:
    # A decoder layer returns its hidden states, or a tuple that starts with them; its annotation says which.
    annotation = type(layer).forward.__annotations__.get("return", "")
    return "output[0]" if "tuple" in str(annotation).lower() else "output"
