"""What experts were really handed and layers really returned, in order of execution.

Hooks are on the modules of experts and on layers, never on a router, and belong to the training without loopscope;
where both trainings are bit-equal, what they saw holds for the other one as well.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from random_configurations import Batch, Configuration
from random_families import LOOPED
from torch.nn.functional import cross_entropy

_LAYER = re.compile(r"(.*\.)?layers\.\d+")


@dataclass
class Handed:
    """What the experts of one layer got of valid tokens, in one forward."""

    counts: list[int]
    top_k: int
    tokens: int
    mass: list[float] | None = None
    """Of each expert, shares of a token adding up to 1; None where experts are not told the weights."""
    layer: int = -1
    """Place of the layer that it happened in, among the layers of this forward."""


@dataclass
class Passed:
    """One call of a layer."""

    norms: list[float]
    """Of each valid token."""
    hidden: torch.Tensor | None = None
    """[N, d] of valid tokens in float64, of a looped model."""


@dataclass
class Forward:
    """One forward of training."""

    layers: list[Passed] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    unproven: bool = False
    """Experts were handed something of which nobody here knows whose it is."""
    task: float | None = None
    """Cross-entropy; None where the model gives no logits of its tokens."""
    total: float = 0.0
    """What backward ran on."""


class Oracle:
    """Forwards of training, by step."""

    def __init__(self, configuration: Configuration) -> None:
        self.forwards: dict[int, list[Forward]] = defaultdict(list)
        self._looped = configuration.family == LOOPED
        self._now: tuple[Forward, torch.Tensor] | None = None
        self._inputs: dict[str, torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        """A forward of training begins."""
        self._now = (Forward(), batch.valid.flatten())

    def failed(self) -> None:
        """It raised: it is none."""
        self._now = None

    def end(self, step: int, batch: Batch, logits: torch.Tensor | None, loss: torch.Tensor) -> None:
        """It ended; recompute in backward is no forward."""
        assert self._now is not None
        forward, self._now = self._now[0], None
        forward.total = float(loss.detach())
        if logits is not None:
            scores = logits.detach().float()[:, :-1].flatten(0, 1)
            forward.task = float(cross_entropy(scores, batch.labels[:, 1:].flatten()))
        self.forwards[step].append(forward)

    def install(self, model: Any) -> list[Any]:
        """Hooks on every layer and its experts."""
        handles = []
        for name, module in model.named_modules():
            if _LAYER.fullmatch(name) or (self._looped and type(module).__name__ == "Layer"):
                handles.append(module.register_forward_hook(self._layer))
            elif type(module).__name__.endswith("ParallelExperts"):
                if name.endswith("mlp.input_linear"):  # JetMoE: experts get their tokens sorted
                    around = model.get_submodule(name.rpartition(".")[0])
                    handles.append(around.register_forward_pre_hook(self._keep(name)))
                    handles.append(module.register_forward_pre_hook(self._sorted(name)))
            elif type(module).__name__.endswith("Experts") and (
                hasattr(module, "num_experts") or hasattr(module, "total_experts")
            ):
                around = model.get_submodule(name.rpartition(".")[0])
                if type(around).forward is not torch.nn.Module.forward:
                    handles.append(around.register_forward_pre_hook(self._keep(name), with_kwargs=True))
                handles.append(module.register_forward_pre_hook(self._indexed(name), with_kwargs=True))
        return handles

    def _layer(self, module: Any, args: Any, output: Any) -> None:
        if self._now is None:
            return
        forward, valid = self._now
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3 or hidden.shape[:2].numel() != len(valid):
            hidden = torch.full((len(valid), 1), torch.nan)
        hidden = hidden.detach().double().flatten(0, -2)[valid]
        norms = hidden.norm(dim=-1).tolist()
        forward.layers.append(Passed(norms, hidden if self._looped else None))

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any = None) -> None:
            given = [*args, *(kwargs or {}).values()]
            self._inputs[name] = given[0].detach().flatten(0, -2).clone()

        return hook

    def _indexed(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if self._now is None:
                return
            from lib.family_check import handed_over

            forward, valid = self._now
            given = [*args, *kwargs.values()]
            size = int(getattr(module, "total_experts", None) or module.num_experts)
            times = handed_over(given, size, self._inputs.get(name))
            if times is None or len(times) != len(valid):
                forward.unproven = True
                return
            times = times[valid]
            top_k = int(times.sum(-1).max()) if len(times) else 0
            mass = _mass(given, valid, times.shape[1])
            forward.handed.append(Handed(times.sum(0).tolist(), top_k, len(times), mass, len(forward.layers)))

        return hook

    def _sorted(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            tokens = self._inputs.pop(name)
            if self._now is None:
                return
            forward, valid = self._now
            rows, sizes = args
            # Which token a row is, the row itself says; tokens that are alike were routed alike.
            alike, good = Counter(map(_bits, tokens)), Counter(map(_bits, tokens[valid]))
            counts = [0.0] * len(sizes)
            for expert, part in enumerate(rows.split([int(size) for size in sizes])):
                for row, count in Counter(map(_bits, part)).items():
                    counts[expert] += count * good[row] / alike[row]
            kept = int(valid.sum())
            forward.handed.append(
                Handed(
                    [round(count) for count in counts],
                    len(rows) // len(tokens),
                    kept,
                    None,
                    len(forward.layers),
                )
            )

        return hook


def _mass(given: Sequence[Any], valid: torch.Tensor, size: int) -> list[float] | None:
    """The weights that experts are handed beside the indices [N, k]."""
    whole = [each for each in given if isinstance(each, torch.Tensor) and not each.is_floating_point()]
    if len(whole) != 1 or whole[0].ndim != 2:
        return None
    idx = whole[0].detach()[valid].long()
    beside = [
        each
        for each in given
        if isinstance(each, torch.Tensor) and each.is_floating_point() and each.shape == whole[0].shape
    ]
    if len(beside) != 1:
        return None
    weights = beside[0].detach()[valid].double()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return torch.zeros(size, dtype=torch.float64).index_add(0, idx.flatten(), weights.flatten()).tolist()


def _bits(row: torch.Tensor) -> bytes:
    return pickle.dumps(row.detach().double().tolist())
