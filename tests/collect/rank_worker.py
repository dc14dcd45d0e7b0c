"""One rank of test_gloo.py: toy model, its own part of a batch, a global run. Started as a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from loopscope import Loopscope
from loopscope.collect import DeviceLoss, GroupReducer
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import ACTIVE_TRACE_SINK

STEPS, BATCH, SEQ, VOCAB = 3, 4, 6, 11


def model():
    torch.manual_seed(0)
    return ToyLoopMoE(vocab_size=VOCAB, width=8)


def batch(step):
    return torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))


def traced(net, ids):
    window = ACTIVE_TRACE_SINK.arm()
    try:
        with torch.no_grad():
            _, lb, z = net(ids)
    finally:
        ACTIVE_TRACE_SINK.disarm()
    return window, lb, z


def device_loss(lb, z, rank_tokens, tokens, num_ranks):
    task_sum = torch.tensor(2.0 * rank_tokens)
    return DeviceLoss(
        task_loss_sum=task_sum,
        num_target_tokens=torch.tensor(rank_tokens),
        lb_loss=lb,
        z_loss=z,
        total_loss=task_sum / tokens + (0.01 * lb + 0.001 * z) / num_ranks,
        lb_loss_factor=0.01,
        z_loss_factor=0.001,
    )


def main(out, kind):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")

    def decide(make):
        answer = [make() if rank == 0 else None]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    net = model()
    scope = Loopscope(Loopscope.Config(out=Path(out), on_error="record"))
    scope.open(
        expected_visits=net.expected_visits(),
        meta=net.trace_meta(),
        rank=rank,
        world_size=world,
        decide=decide,
        reducer=GroupReducer(torch.device("cpu")),
    )
    collector = scope.begin_attempt()
    for step in range(1, STEPS + 1):
        scope.begin_step(step, tokens_seen=BATCH * SEQ * step)
        window, lb, z = traced(net, batch(step).chunk(world)[rank])
        if rank == 1 and step == 2:
            if kind == "empty":
                window.clear()
            if kind == "error":
                window[99] = window.pop(2)
        collector.on_trace_step(step, window, net.trace_meta())
        collector.submit_loss(step, device_loss(lb, z, BATCH // world * SEQ, BATCH * SEQ, world))
    scope.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
