"""A random training without loopscope and the same one with it: what each ended with."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from random_configurations import Batch, Configuration, batches, build
from random_families import LOOPED, looped_plan
from random_oracle import Oracle
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import loopscope

RESUMED = 3
"""The step that a second attachment begins with."""


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
    hooks: int = 0
    """Hooks that are left on the model, but for the oracle's."""
    python_rng: str = ""
    numpy_rng: str = ""
    torch_rng: str = ""
    error: str = ""


class InjectedError(Exception):
    """One of the failures that a loop outlives."""


def plan_of(configuration: Configuration, model: Any) -> dict[str, Any] | None:
    """The capture plan that a user of this model writes; None: `attach(model)` alone."""
    return looped_plan(model) if configuration.family == LOOPED else None


def train(configuration: Configuration, *, out: Path | None = None, oracle: Oracle | None = None) -> Ending:
    """Train; with loopscope where `out` is given. An exception is part of the ending."""
    training = _Training(configuration, out, oracle)
    try:
        training.run()
    except Exception as error:  # noqa: BLE001 - a training that ends is what is looked for
        training.ending.error = f"{type(error).__name__}: {error}"
    return training.ended()


class _Training:
    def __init__(self, configuration: Configuration, out: Path | None, oracle: Oracle | None) -> None:
        self.configuration, self.out, self.oracle = configuration, out, oracle
        self.rank = dist.get_rank() if configuration.ranks > 1 else 0
        self.ending = Ending()
        self.model: Any = build(configuration)
        self.data = batches(configuration, self.rank)
        seed = configuration.number * 10 + self.rank
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        self.forward: Any = self.model
        if configuration.parallel == "ddp":
            unused = not configuration.is_strict  # experts of their own, of which a batch may use none
            self.forward = torch.nn.parallel.DistributedDataParallel(
                self.model, find_unused_parameters=unused
            )
        elif configuration.parallel == "fsdp":
            self._shard()
        self.optimizers = self._made()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.run_: Any = None
        self.updates = 0
        self.logged: set[int] = set()
        self.handles = [] if oracle is None else oracle.install(self.model)

    def _shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def _made(self) -> list[torch.optim.Optimizer]:
        parameters, update = [*self.model.parameters()], self.configuration.update
        if update == "lbfgs":
            return [torch.optim.LBFGS(parameters, lr=0.01, max_iter=2)]
        if update == "closure":
            return [torch.optim.SGD(parameters, lr=0.01)]
        half = len(parameters) // 2
        groups = {
            "two optimizers": [parameters[:half], parameters[half:]],
            "in backward": [[p] for p in parameters],
        }
        made = groups.get(update, [parameters])
        found: list[torch.optim.Optimizer] = []
        found += [
            torch.optim.AdamW(group, lr=1e-3, eps=1e-4) for group in made
        ]  # 1e-8 is 0 in half precision
        if update == "in backward":
            for parameter, optimizer in zip(parameters, found, strict=True):
                parameter.register_post_accumulate_grad_hook(_stepping(optimizer))
        return found

    def run(self) -> None:
        """Every step; the second attachment goes on with the first one's run."""
        if not self.configuration.resumes:
            return self._steps(1, self.data)
        self._steps(1, self.data[: RESUMED - 1])
        self._steps(RESUMED, self.data[RESUMED - 1 :])
        return None

    def _steps(self, first: int, data: list[list[Batch]]) -> None:
        with contextlib.ExitStack() as stack:
            if self.out is not None:
                self.run_ = stack.enter_context(self._attached(first))
            for step, group in enumerate(data, start=first):
                self._step(step, group)

    def _attached(self, first: int) -> Any:
        configuration = self.configuration
        options: dict[str, Any] = {"plan": plan_of(configuration, self.model), "first_step": first}
        if configuration.told == "counted":
            options["num_microbatches"] = configuration.microbatches[0]
        elif configuration.told == "optimizer":
            options["optimizer"] = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
            options["first_step"] = self.updates + 1
        return loopscope.attach(self.model, out=self.out or "", every=1, resume=first > 1, **options)

    def _step(self, step: int, group: list[Batch]) -> None:
        configuration = self.configuration
        if self.run_ is not None and configuration.told.startswith("begin_step"):
            number = len(group) if configuration.told.endswith("number") else None
            self.run_.begin_step(step, num_microbatches=number)
        if configuration.update in ("closure", "lbfgs"):
            for optimizer in self.optimizers:
                optimizer.step(lambda: self._gradients(step, group))
        else:
            self._gradients(step, group)
            self._update(step)
        self.updates += not self._skips(step)
        if configuration.evaluates == "between steps":
            self.model.eval()
            with torch.no_grad():
                self._call(group[0])
            self.model.train()

    def _skips(self, step: int) -> bool:
        return self.configuration.update == "scaler" and step == 2

    def _gradients(self, step: int, group: list[Batch]) -> float:
        """Forwards and backwards of one group; the mean loss."""
        configuration, total = self.configuration, 0.0
        if configuration.update != "in backward":
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        # An update that a scaler skips is none: where the optimizer tells, its forwards count to the next one.
        counted = self.updates + 1 if configuration.told == "optimizer" else step
        for index, batch in enumerate(group):
            if (step, index) == (2, 0) and configuration.fails:
                self._fail(batch)
            if configuration.evaluates == "between microbatches":
                with torch.no_grad():
                    self._call(batch)
            if self.oracle is not None:
                self.oracle.begin(batch)
            output, loss = self._call(batch)
            if self.oracle is not None:
                self.oracle.end(counted, batch, _logits(output, batch), loss)
            self.ending.losses.append(float(loss.detach()).hex())
            scaled = loss / len(group)
            if configuration.update == "scaler":
                scaled = self.scaler.scale(scaled)
            self._log(loss, last=index == len(group) - 1)
            scaled.backward()
            total += float(loss.detach()) / len(group)
        if configuration.ranks > 1 and configuration.parallel == "all-reduce":
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        return total

    def _log(self, loss: torch.Tensor, *, last: bool) -> None:
        """Say the loss where the model does not, once a step."""
        if self.run_ is not None and self.configuration.loss == "loop" and last:
            if self.run_.step not in self.logged:
                self.run_.log_loss(float(loss.detach()))
            self.logged.add(self.run_.step)

    def _update(self, step: int) -> None:
        if self.configuration.update == "in backward":
            return
        if self._skips(step):
            next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float("inf"))
        if self.configuration.update == "scaler":
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.ending.gradients.append(
                float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm).hex()
            )
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _fail(self, batch: Batch) -> None:
        """A forward that raises, as one that runs out of memory does; the loop tries again."""
        layers = [
            module for name, module in self.model.named_modules() if type(module).__name__.endswith("Layer")
        ]
        inside = layers[len(layers) // 2] if layers else next(self.model.children())
        head = getattr(self.model, "get_output_embeddings", lambda: getattr(self.model, "head", None))()
        module = inside if self.configuration.fails == "within" or head is None else head
        handle = module.register_forward_hook(_raising)
        with contextlib.suppress(InjectedError):
            self._call(batch)
        handle.remove()

    def _call(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        """One forward, and what backward runs on."""
        configuration = self.configuration
        given = dict(batch.arguments)
        if configuration.family != LOOPED:
            given["use_cache"] = False
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=configuration.dtype == "autocast"):
            if configuration.checkpoint == "model" and torch.is_grad_enabled():
                output = checkpoint(self.forward, use_reentrant=False, **given)
            else:
                output = self.forward(**given)
        if configuration.loss == "model":
            return output, output.loss
        if (logits := _logits(output, batch)) is None:
            first = output if isinstance(output, torch.Tensor) else output.to_tuple()[0]
            return output, first.float().square().mean()
        return output, cross_entropy(
            logits.float()[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), label_smoothing=0.1
        )

    def ended(self) -> Ending:
        """The ending of it all."""
        ending, model = self.ending, self.model
        for handle in self.handles:
            handle.remove()
        ending.hooks = sum(
            len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()
        )
        ending.parameters = _hash([*model.parameters()])
        ending.buffers = _hash([*model.buffers()])
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        ending.optimizer = _hash([value for state in states for value in state.values()])
        rng = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        ending.python_rng, ending.numpy_rng, ending.torch_rng = (
            hashlib.sha256(pickle.dumps(state)).hexdigest() for state in rng
        )
        return ending


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    def hook(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def _raising(*_: Any) -> None:
    raise InjectedError


def _logits(output: Any, batch: Batch) -> torch.Tensor | None:
    """Scores of the next token, where the model gives them."""
    found = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if found is None or found.ndim != 3 or found.shape[:2] != batch.labels.shape:
        return None
    return found if found.shape[-1] > int(batch.labels.max()) else None


def _hash(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in _flat(values):
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            value = local.detach().double().tolist()
        found.update(pickle.dumps(value))
    return found.hexdigest()


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(list(value))
        else:
            yield value
