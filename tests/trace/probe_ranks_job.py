"""One rank of test_probe_ranks: trains a sharded toy model with and without probes, and compares."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from loopscope.errors import ProbeError
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import NullCollector, run_probe_forward

STEPS = 4


class Counting(NullCollector):
    visits = 0

    def on_probe_step(self, step, sink, meta, per_token_loss):
        Counting.visits += len(sink)
        return {}


def sharded():
    torch.manual_seed(0)
    model = ToyLoopMoE(vocab_size=11, width=16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (model.head, *model.stack, model.tail):
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def train(probe):
    """`probe(model, moment)` is called before each update (between backward and step) and after it."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        ids = torch.randint(11, (2, 8))
        logits, lb, z = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * lb + 0.001 * z
        optimizer.zero_grad()
        loss.backward()
        probe(model)
        optimizer.step()
        probe(model)
        found.append(loss.item())
    return found, [p.to_local().clone() for p in model.parameters()], torch.get_rng_state()


def same(one, other):
    return (
        one[0] == other[0]
        and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        and torch.equal(one[2], other[2])
    )


def main():
    dist.init_process_group("gloo")
    corpus = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(1))
    plain = train(lambda model: None)

    def probe(model):
        run_probe_forward(model, corpus, collector=Counting(), step=0, batch_size=2)

    assert same(plain, train(probe)), "probes changed the training"
    assert Counting.visits == 2 * STEPS * 8

    def failing(model):
        # On one rank alone loopscope's own code fails in the first forward; the other ranks need the second.
        import loopscope.trace.probe as module

        original = module.check_logits
        if dist.get_rank() == 1:
            module.check_logits = fail
        try:
            run_probe_forward(model, corpus, collector=NullCollector(), step=0, batch_size=2)
            failed.append(False)
        except ProbeError:
            failed.append(True)
        finally:
            module.check_logits = original

    failed = []
    assert same(plain, train(failing)), "a failure on one rank changed the training"
    assert failed == [dist.get_rank() == 1] * 2 * STEPS
    dist.destroy_process_group()


def fail(*arguments):
    raise ProbeError("failed on purpose")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
