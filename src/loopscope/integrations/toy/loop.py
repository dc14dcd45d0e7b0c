"""The training loop of the toy: the least that a custom loop has to do."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.integrations.toy.guard import GuardedCollector
from loopscope.integrations.toy.text import ToyCorpus
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import ACTIVE_TRACE_SINK, LoopTraceCollector, LossComponents, run_probe_forward

LB_FACTOR = 0.01
Z_FACTOR = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySettings:
    """One toy run."""

    steps: int
    """Optimizer steps."""
    is_trace_step: Callable[[int], bool]
    """1-based step → traced or not."""
    is_probe_step: Callable[[int], bool]
    """Step → probe after it or not; asked for 0 too, before the first update."""
    batch_size: int = 8
    """Windows per step."""
    seq_len: int = 64
    """Characters per window."""
    lr: float = 1e-2
    """Learning rate."""
    seed: int = 0
    """Seed of parameters and batches."""


@dataclass(kw_only=True, slots=True)
class ToyResult:
    """What a toy run saw."""

    losses: list[float] = field(default_factory=list)
    """Task loss of each step, nats per character."""
    traced_steps: int = 0
    """Training steps that were traced."""
    probes: int = 0
    """Probes that ran."""
    visits_checked: int = 0
    """Visits after which every tensor and storage was found released."""


def build_toy_model(corpus: ToyCorpus, *, seed: int = 0) -> ToyLoopMoE:
    """The toy's model for this corpus, the same for the same seed."""
    torch.manual_seed(seed)
    return ToyLoopMoE(vocab_size=corpus.vocab_size)


def train_toy(
    model: ToyLoopMoE,
    corpus: ToyCorpus,
    collector: LoopTraceCollector,
    settings: ToySettings,
    *,
    begin_step: Callable[[int, int], None] = lambda step, tokens_seen: None,
) -> ToyResult:
    """Train `model`, with the leak check after every callback, after every backward, and in every probe.

    Args:
        model: the toy model.
        corpus: what to train on and to probe.
        collector: called at every step.
        settings: length and schedule.
        begin_step: called with (step, tokens seen with it) before each step's callbacks.

    Raises:
        LeakError: a trace tensor or its storage outlived a callback.
    """
    guard, result = GuardedCollector(collector, model), ToyResult()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    batches = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.steps + 1):
        begin_step(step, step * settings.batch_size * settings.seq_len)
        if step > 0:
            ids = corpus.batch(batches, batch_size=settings.batch_size, seq_len=settings.seq_len)
            tracing = settings.is_trace_step(step)
            loss, grad_norm = _train_step(model, optimizer, ids, guard, step, tracing)
            guard.check_after_backward()
            guard.on_metrics_step(step, loss, grad_norm, settings.lr)
            result.losses.append(loss.task_loss)
            result.traced_steps += tracing
        if settings.is_probe_step(step):
            run_probe_forward(model, corpus.probe_ids, collector=guard, step=step)
            result.probes += 1
    result.visits_checked = guard.visits_checked
    return result


def _train_step(
    model: ToyLoopMoE,
    optimizer: torch.optim.Optimizer,
    ids_BS: Tensor,
    collector: LoopTraceCollector,
    step: int,
    tracing: bool,
) -> tuple[LossComponents, float]:
    # A function of its own: when it returns, loss and outputs are gone.
    if tracing:
        ACTIVE_TRACE_SINK.arm()
    try:
        logits_BSV, lb, z = model(ids_BS)
    finally:
        sink = ACTIVE_TRACE_SINK.disarm(on_error="raise")  # closed before backward
    if sink is not None:
        try:
            collector.on_trace_step(step, sink, model.trace_meta())
        finally:
            sink.clear()
    task = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    total = task + LB_FACTOR * lb + Z_FACTOR * z
    optimizer.zero_grad()
    total.backward()
    grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return LossComponents(
        task_loss=task.item(),
        lb_loss=lb.item(),
        lb_loss_factor=LB_FACTOR,
        z_loss=z.item(),
        z_loss_factor=Z_FACTOR,
        total_loss=total.item(),
    ), grad_norm
