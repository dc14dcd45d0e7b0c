"""mlx-lm's MoE models (OLMoE, Qwen3-MoE, Mixtral), on Apple silicon or on a Linux CPU.

Logits come from the gate, the experts used from what the expert layer was called with, the weights follow exactly
from both. Arrays become torch tensors without a copy (DLPack), and from there on everything is as elsewhere.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from loopscope.capture.errors import PlanError, ReconcileError
from loopscope.capture.local_variables import LocalVariables, check_local_names, local_names
from loopscope.capture.mlx_hooks import hook
from loopscope.capture.plan_adapter import PlanAdapter, plan_of_layers
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.source import DECODERS, Call
from loopscope.capture.spec import CapturePlan, CaptureSpec
from loopscope.capture.torch_base import After
from loopscope.capture.window import Boundary, Window, boundaries_of
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.trace import TracePoint

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)")


def _softmax_first(block: Any) -> RoutingSpec:
    return RoutingSpec(
        num_experts=int(block.num_experts),
        top_k=int(block.top_k),
        score_func="softmax",
        order="score_then_topk",
        normalised=bool(block.norm_topk_prob),
        balancing="unknown",
        sources={
            "num_experts": "block.num_experts",
            "top_k": "block.top_k",
            "normalised": "block.norm_topk_prob",
        },
    )


def _topk_first(block: Any) -> RoutingSpec:
    return RoutingSpec(
        num_experts=int(block.num_experts),
        top_k=int(block.num_experts_per_tok),
        score_func="softmax",
        order="topk_then_score",
        normalised=True,
        balancing="unknown",
        sources={"num_experts": "block.num_experts", "top_k": "block.num_experts_per_tok"},
    )


def _every(args: Any, layer: int) -> bool:
    return True


def _names_experts(args: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(args, name, None) or 0) > 1 for name in names)


def _qwen(args: Any, layer: int) -> bool:
    return bool(
        args.num_experts > 0
        and (layer + 1) % args.decoder_sparse_step == 0
        and layer not in args.mlp_only_layers
    )


FAMILIES: Mapping[str, tuple[Callable[[Any], RoutingSpec], Callable[[Any, int], bool]]] = {
    "OlmoeSparseMoeBlock": (_softmax_first, _every),
    "Qwen3MoeSparseMoeBlock": (_softmax_first, _qwen),
    "MixtralSparseMoeBlock": (_topk_first, _every),
}
"""Class name of a MoE block → (its routing, which layers the model's arguments declare)."""


def _is_switch(module: Any) -> bool:
    """True of mlx-lm's layers of many experts, whatever they are called."""
    return any(kind.__module__ == "mlx_lm.models.switch_layers" for kind in type(module).__mro__)


class MlxAdapter(PlanAdapter):
    """A model of mlx-lm. Every forward in training mode counts: mlx does not tell whether gradients are taken."""

    def __init__(self, model: Any, **options: Any) -> None:
        if not callable(getattr(model, "named_modules", None)) or not hasattr(model, "layers"):
            raise ConfigError(f"got {type(model).__name__}, expected a model of mlx-lm with `layers`.")
        super().__init__(model, **options)
        modules = self.modules()
        for name, spec in self.plan.items():
            where = f"plan[{name!r}]"
            check_local_names(local_names(spec.sources(where).values()), type(modules[name]).__call__, where)

    def modules(self) -> dict[str, Any]:
        """Every module by name, layers in the order of their numbers: mlx itself lists them in none."""

        def key(item: tuple[str, Any]) -> list[tuple[int, str]]:
            return [(int(part), "") if part.isdigit() else (-1, part) for part in item[0].split(".")]

        return dict(sorted(self.model.named_modules(), key=key))

    def derive(self) -> CapturePlan:
        """One block per layer, dense ones included; a dense model has no other.

        Raises:
            CoverageError: the MoE layers found are not those that the model's arguments declare.
            PlanError: a MoE block of a class that is not known, or no layers.
        """
        modules = self.modules()
        layers = [(name, int(match[1]), "output") for name in modules if (match := _LAYER.fullmatch(name))]
        if not layers:
            raise PlanError("the model has no module `layers.0`; expected a model of mlx-lm.")
        has_experts = any(map(_is_switch, modules.values())) or _names_experts(self.model.args)

        # Of no family yet: a model without experts declares no layer.
        declares: Callable[[Any, int], bool] = lambda args, layer: has_experts  # noqa: E731

        def moes_of(layer: str) -> dict[str, dict[str, CaptureSpec]]:
            nonlocal declares
            found: dict[str, dict[str, CaptureSpec]] = {}
            for name in modules:
                block, _, last = name.rpartition(".")
                if last != "switch_mlp" or not name.startswith(layer + "."):
                    continue
                if (kind := type(modules[block]).__name__) not in FAMILIES:
                    raise PlanError(f"{block} is a {kind}, expected one of {', '.join(FAMILIES)}.")
                routing, declares = FAMILIES[kind]
                spec = routing(modules[block])
                probs = {"router_probs": "decode.mlx_softmax"} if spec.order == "score_then_topk" else {}
                found[block] = {
                    f"{block}.gate": CaptureSpec(tensors={"router_logits": "output", **probs}),
                    name: CaptureSpec(tensors={"topk_idx": "input[1]"}, routing=spec),
                }
            return found

        return plan_of_layers(
            self.model,
            layers,
            moes_of,
            lambda: tuple(number for _, number, _ in layers if declares(self.model.args, number)),
        )

    @contextmanager
    def listening(self) -> Iterator[Window]:
        """See `Adapter`."""
        window = MlxWindow(self.plan, self.places)
        modules = self.modules()
        with ExitStack() as stack:
            for name, boundary in boundaries_of(self.plan).items():
                stack.callback(hook(modules[name], _recording(window, boundary, modules[name])))
            yield window

    def install(self, before: Callable[[], None], after: After) -> Callable[[], None]:
        """See `Adapter`."""

        def around(
            module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
        ) -> Any:
            before()
            try:
                output = call()
            except BaseException:
                after(args, kwargs, None, True)
                raise
            after(args, kwargs, output, False)
            return output

        return hook(self.model, around)

    def is_training(self) -> bool:
        """True in training mode."""
        return bool(self.model.training)

    def as_torch(self, mask: Any) -> Any:
        """See `PlanAdapter`."""
        return _torch(mask)


class MlxWindow(Window):
    """Keeps mlx arrays while the forward runs, and hands them over as torch tensors at its end."""

    def take(self, value: Any, name: str) -> Any:
        """Keep the array; it is evaluated with all others at the end."""
        import mlx.core as mx

        if not isinstance(value, mx.array):
            raise ReconcileError(f"{name} is {type(value).__name__}, expected an mlx array")
        return mx.stop_gradient(value)

    def points(self, *, verify: bool = True) -> list[TracePoint]:
        """See `Window.points`.

        Raises:
            UnsupportedError: the forward is being compiled, so that its arrays have no values.
        """
        import mlx.core as mx

        arrays = [array for visit in self.visits for array in (visit.residual, *visit.router.values())]
        try:
            mx.eval(arrays)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"the traced forward runs inside mx.compile, whose arrays cannot leave it. Do not compile the function "
                f"that calls the model while it is attached. ({str(error).splitlines()[0]})"
            ) from None
        for visit in self.visits:
            visit.residual = _torch(visit.residual)
            visit.router = {name: _torch(array) for name, array in visit.router.items()}
        return super().points(verify=verify)


def _recording(window: Window, boundary: Boundary, module: Any) -> Any:
    names = local_names(boundary.sources.values())
    local = LocalVariables(module, type(module).__call__, names) if names else None

    def around(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        window.began(boundary)
        try:
            with nullcontext() if local is None else local.during():
                output = call()
        except BaseException:
            window.failed(boundary)
            raise
        window.record(boundary, Call(module, args, kwargs, output, local.take() if local else None))
        return output

    return around


def _torch(array: Any) -> Any:
    import torch
    from torch.utils.dlpack import from_dlpack

    tensor = from_dlpack(array)
    # Indices are uint32 in mlx, which torch cannot compute with.
    return tensor.long() if tensor.dtype == torch.uint32 else tensor


def _mlx_softmax(module: Any, output: Any) -> Any:
    # The model's own operation on the model's own logits, so that its choice can be reproduced bit for bit.
    import mlx.core as mx

    return mx.softmax(output, axis=-1, precise=True)


DECODERS["mlx_softmax"] = _mlx_softmax
