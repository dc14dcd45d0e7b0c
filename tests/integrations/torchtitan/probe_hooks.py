"""What a scenario does to its trainer beside training: failures in a probe, and modules with habits."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

import loopscope.trace.probe as probe
from loopscope.errors import ProbeError

_CHECK = probe.check_logits


def install(trainer: Any, scenario: dict[str, Any]) -> None:
    """Do what the scenario's keys say; what an earlier scenario did in this process is undone."""
    probe.check_logits = _CHECK
    if scenario.get("habits"):
        _add_habits(trainer.model)
    if (rank := scenario.get("fail_on_rank")) is not None:
        probe.check_logits = _failing if dist.get_rank() == rank else _CHECK
    if (step := scenario.get("kill_in_probe")) is not None:
        probe.check_logits = _once_at(trainer, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if (step := scenario.get("interrupt_in_probe")) is not None:
        trainer.interrupted_in = []
        # What is left of Ctrl-C in a job that handles it: a note, made when the signal is delivered.
        signal.signal(signal.SIGINT, lambda *_: trainer.interrupted_in.append(probe.ACTIVE_TRACE_SINK.armed))
        probe.check_logits = _once_at(trainer, step, lambda: signal.raise_signal(signal.SIGINT))


def _failing(*_: object) -> None:
    raise ProbeError("failed on purpose, on one rank")


def _once_at(trainer: Any, step: int, act: Any) -> Any:
    done = []

    def check(*arguments: Any) -> None:
        if trainer.step == step and not done:
            done.append(True)
            act()
        _CHECK(*arguments)

    return check


class Habits(nn.Module):
    """Draws from a generator of its own, counts tokens in eval, keeps a submodule in eval, starts a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("drawn", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> None:
        self.tokens += ids.numel()
        self.drawn += torch.rand(2, generator=self.own) + self.python.random()
        assert not self.frozen.training
        # Its sampler takes a seed from the global stream.
        next(iter(DataLoader(range(4), sampler=RandomSampler(range(4)))))


def _add_habits(model: nn.Module) -> None:
    habits = Habits()
    model.habits = habits
    model.register_forward_pre_hook(lambda module, arguments: habits(arguments[0]))
