"""Short runs of the toy model with trackers; the toy is built anew, so that two runs see the same numbers."""

import torch

from loopscope import Loopscope, LossComponents
from loopscope.collect import ProbeCorpus
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import ACTIVE_TRACE_SINK, run_probe_forward

IDS = torch.arange(12).remainder(11).reshape(2, 6)


class Logits(torch.nn.Module):
    """The toy as a probe wants it: token ids in, logits out."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.trace_meta = model.trace_meta

    def forward(self, ids):
        return self.model(ids)[0]


class Corpus:
    name, corpus_hash, strata = "tiny", "abc", {"repetition": ("low", "high")}


def loss(step):
    task = 2.0 / step
    return LossComponents(
        task_loss=task, lb_loss=1.0, lb_loss_factor=0.1, z_loss=0.0, z_loss_factor=0.0, total_loss=task + 0.1
    )


def train(out, *, first=1, last=12, probe_at=(), prepare=lambda scope: None, model=None, **config):
    """Train the toy's steps `first` to `last`, resuming where `first` is not 1; gives its parameters at the end."""
    torch.manual_seed(3)
    model = model or ToyLoopMoE(vocab_size=11, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    resume = first > 1
    scope = Loopscope(Loopscope.Config(**{"out": out, "trace_every": 3, "resume": resume, **config}))
    with scope:
        prepare(scope)
        scope.open(expected_visits=model.expected_visits(), meta=model.trace_meta())
        scope.use_corpus(Corpus())
        parent = {"parent_run_id": scope.run_id, "parent_attempt": 1} if resume else {}
        collector = scope.begin_attempt(first_step=first, **parent)
        for step in range(first, last + 1):
            scope.begin_step(step, tokens_seen=12 * step)
            window = ACTIVE_TRACE_SINK.arm() if scope.is_trace_step(step, last) else None
            try:
                logits = model(IDS)[0]
            finally:
                if window is not None:
                    ACTIVE_TRACE_SINK.disarm()
            if window is not None:
                collector.on_trace_step(step, window, model.trace_meta())
                window.clear()
            objective = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            collector.on_metrics_step(step, loss(step), 0.5, 0.01)
            if step in probe_at:
                run_probe_forward(Logits(model), IDS, collector=collector, step=step)
    return [parameter.detach().clone() for parameter in model.parameters()]


__all__ = ["IDS", "Corpus", "Logits", "ProbeCorpus", "loss", "train"]
