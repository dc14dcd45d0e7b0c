"""Small trainings that are sick on purpose: the toy model in a plain loop, with one thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from loopscope import Loopscope
from loopscope.integrations.toy import load_toy_corpus
from loopscope.models.toy import ToyBlock, ToyLoopMoE
from loopscope.trace import ACTIVE_TRACE_SINK, LossComponents

Sickness = Literal["healthy", "dead experts", "growing loop", "loss counted twice"]
DEAD = (2, 5)
STEPS, TRACE_EVERY = 110, 2
WARM = 64
"""Steps until a healthy one's routers are balanced: its gates learn faster than the rest, by a large factor."""
LB_FACTOR, Z_FACTOR = 1.0, 0.001
LR, GATE_LR = 1e-3, 5e-3


class GrowingBlock(ToyBlock):
    """Hands on 1.2 times what it got, whatever it adds."""

    def forward(self, h_BSD):
        out_BSD, *rest = super().forward(h_BSD)
        grown_BSD = h_BSD + 0.05 * (out_BSD - h_BSD)
        return (1.2 * grown_BSD, *rest)


def train(path: Path, sickness: Sickness, *, loops: int = 8, seed: int = 0) -> Path:
    """A run of 110 steps, every second of them traced, at R = 8."""
    corpus = load_toy_corpus()
    torch.manual_seed(seed)
    model = ToyLoopMoE(vocab_size=corpus.vocab_size, num_layers_in_stack=1, num_stacks=loops)
    if sickness == "growing loop":
        model.stack[0] = GrowingBlock(32, model.num_experts, model.top_k)
    if sickness == "dead experts":
        gate = model.stack[0].gate
        bias = torch.zeros(model.num_experts)
        bias[list(DEAD)] = -30.0
        gate.register_forward_hook(lambda module, given, logits: logits + bias)
    gates = [block.gate.weight for block in (model.head, *model.stack, model.tail)]
    others = [p for p in model.parameters() if all(p is not gate for gate in gates)]
    optimizer = torch.optim.AdamW([{"params": others, "lr": LR}, {"params": gates, "lr": GATE_LR}])
    generator = torch.Generator().manual_seed(seed)
    config = Loopscope.Config(out=path, trace_every=TRACE_EVERY, probe_every=0, on_error="raise")
    with Loopscope(config) as scope:
        collector = scope.start(model)
        for step in range(1, STEPS + 1):
            ids_BS = corpus.batch(generator, batch_size=4, seq_len=64)
            scope.begin_step(step, tokens_seen=step * ids_BS.numel())
            traced = step % TRACE_EVERY == 0
            if traced:
                ACTIVE_TRACE_SINK.arm()
            logits_BSV, lb, z = model(ids_BS)
            if traced:
                sink = ACTIVE_TRACE_SINK.disarm()
                collector.on_trace_step(step, sink, model.trace_meta())
                sink.clear()
            task = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
            total = task + LB_FACTOR * lb + Z_FACTOR * z
            if sickness == "loss counted twice":
                total = total + LB_FACTOR * lb
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            parts = LossComponents(
                task_loss=task.item(), lb_loss=lb.item(), lb_loss_factor=LB_FACTOR, z_loss=z.item(),
                z_loss_factor=Z_FACTOR, total_loss=total.item(),
            )  # fmt: skip
            collector.on_metrics_step(step, parts)
    return path
