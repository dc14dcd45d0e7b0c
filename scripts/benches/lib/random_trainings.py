"""A random training without loopscope and the same one with it: what each ended with, and what the rows should say.

The oracle listens to what experts and layers are called with and return, never to a router. It belongs to the training
without loopscope; where both are bit-equal, it holds for the other as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from random_configurations import Batch, Configuration, batches, build
from torch.utils.checkpoint import checkpoint

import loopscope

LAYERS = ".layers."


@dataclass
class Ending:
    """What a training ended with; text and numbers only, so that ranks can exchange it."""

    losses: list[str] = field(default_factory=list)
    """Every forward's loss, bit for bit."""
    parameters: str = ""
    gradients: list[str] = field(default_factory=list)
    """Norm before clipping, each step, bit for bit."""
    buffers: str = ""
    optimizer: str = ""
    python_rng: str = ""
    numpy_rng: str = ""
    torch_rng: str = ""
    error: str = ""


@dataclass
class Oracle:
    """What experts were really handed and blocks really returned, of valid tokens, by step and layer."""

    counts: dict[tuple[int, int], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    experts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Layer → (E, k)."""
    norms: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Norm of each valid token."""
    task: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Cross-entropy of each forward."""
    total: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    at: tuple[int, Batch] | None = None
    """(step, batch) while a forward of training runs; None outside, recompute included."""

    def install(self, model: Any) -> list[Any]:
        """Hooks on every layer and its experts."""
        handles = []
        for name, module in model.named_modules():
            _, found, rest = f".{name}".partition(LAYERS)
            number, _, within = rest.partition(".")
            if not found or not number.isdigit():
                continue
            layer = int(number)
            if not within:
                handles.append(module.register_forward_hook(self._layer(layer)))
            elif within == "mlp.input_linear":  # JetMoE: experts get their tokens sorted
                moe = model.get_submodule(name.rpartition(".")[0])
                handles.append(module.register_forward_pre_hook(self._sorted(layer, moe), with_kwargs=True))
            elif within.endswith(".experts") and type(module).__name__.endswith("Experts"):
                handles.append(module.register_forward_pre_hook(self._indexed(layer), with_kwargs=True))
        return handles

    def _layer(self, layer: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self.at is not None:
                step, batch = self.at
                hidden = output[0] if isinstance(output, tuple) else output
                norms = hidden.detach().double().norm(dim=-1)[batch.valid]
                self.norms[step, layer] += norms.tolist()

        return hook

    def _indexed(self, layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if self.at is not None:
                step, batch = self.at
                index = next(each for each in (*args, *kwargs.values()) if not each.is_floating_point())
                self.experts[layer] = (int(module.num_experts), index.shape[-1])
                self.counts[step, layer].update(
                    index.reshape(*batch.valid.shape, -1)[batch.valid].flatten().tolist()
                )

        return hook

    def _sorted(self, layer: int, moe: Any) -> Any:
        seen: list[torch.Tensor] = []
        moe.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))

        def hook(module: Any, args: Any, kwargs: Any) -> None:
            tokens = seen.pop().flatten(0, 1)
            if self.at is None:
                return
            step, batch = self.at
            rows, sizes = args
            # Which token a row is, the row itself says; tokens that are alike were routed alike.
            alike, good = Counter(map(_bits, tokens)), Counter(map(_bits, tokens[batch.valid.flatten()]))
            handed = Counter(
                (expert, _bits(row))
                for expert, part in enumerate(rows.split([int(s) for s in sizes]))
                for row in part
            )
            for (expert, row), count in handed.items():
                self.counts[step, layer][expert] += count * good[row] // alike[row]
            self.experts[layer] = (len(sizes), len(rows) // len(tokens))

        return hook

    def loss(self, output: Any) -> None:
        """Take the parts of one forward's loss."""
        assert self.at is not None
        step, batch = self.at
        labels = batch.arguments["labels"][:, 1:]
        logits = output.logits.detach().float()[:, :-1].flatten(0, 1)
        self.task[step].append(float(torch.nn.functional.cross_entropy(logits, labels.flatten())))
        self.total[step].append(float(output.loss.detach()))


def _bits(row: torch.Tensor) -> bytes:
    return pickle.dumps(row.detach().double().tolist())


def train(configuration: Configuration, *, out: Path | None = None, oracle: Oracle | None = None) -> Ending:
    """Train; with loopscope where `out` is given. An exception is part of the ending."""
    rank = dist.get_rank() if configuration.ranks > 1 else 0
    ending = Ending()
    model = build(configuration)
    data = batches(configuration, rank)
    seed = configuration.number * 10 + rank
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # 1e-8 is 0 in half precision
    handles = [] if oracle is None else oracle.install(model)
    try:
        with contextlib.ExitStack() as stack:
            run = None
            if out is not None:
                count = configuration.microbatches[0] if configuration.told == "counted" else 1
                run = stack.enter_context(loopscope.attach(model, out=out, every=1, num_microbatches=count))
            for _ in _steps(configuration, model, optimizer, data, run, oracle, ending):
                pass
    except Exception as error:  # noqa: BLE001 - a training that ends is what is looked for
        ending.error = f"{type(error).__name__}: {error}"
    for handle in handles:
        handle.remove()
    ending.parameters = _hash([*model.parameters()])
    ending.buffers = _hash([*model.buffers()])
    ending.optimizer = _hash([value for state in optimizer.state.values() for value in state.values()])
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    ending.python_rng, ending.numpy_rng, ending.torch_rng = (
        hashlib.sha256(pickle.dumps(state)).hexdigest() for state in states
    )
    return ending


def _steps(
    configuration: Configuration,
    model: Any,
    optimizer: Any,
    data: list[list[Batch]],
    run: Any,
    oracle: Oracle | None,
    ending: Ending,
) -> Iterator[None]:
    forward = torch.nn.parallel.DistributedDataParallel(model) if configuration.ddp else model
    for step, group in enumerate(data, start=1):
        if run is not None and configuration.told != "counted":
            number = len(group) if configuration.told == "begin_step and number" else None
            run.begin_step(step, num_microbatches=number)
        for index, batch in enumerate(group):
            if configuration.fails and (step, index) == (2, 0):
                with contextlib.suppress(ValueError, RuntimeError):
                    _forward(configuration, forward, {**batch.arguments, "labels": torch.zeros(1, 3).long()})
            if oracle is not None:
                oracle.at = (step, batch)
            output = _forward(configuration, forward, batch.arguments)
            if oracle is not None:
                oracle.loss(output)
                oracle.at = None
            ending.losses.append(float(output.loss.detach()).hex())
            (output.loss / len(group)).backward()
        if configuration.ranks > 1 and not configuration.ddp:
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ending.gradients.append(float(norm).hex())
        optimizer.step()
        optimizer.zero_grad()
        if configuration.evaluates and step == 1:
            model.eval()
            with torch.no_grad():
                model(**group[0].arguments)
            model.train()
        yield


def _forward(configuration: Configuration, model: Any, arguments: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=configuration.dtype == "autocast"):
        if configuration.checkpoint == "model":
            return checkpoint(model, use_reentrant=False, use_cache=False, **arguments)
        return model(**arguments, use_cache=False)


def _hash(tensors: list[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(pickle.dumps(tensor.detach().double().tolist()))
    return found.hexdigest()
