"""One of two ranks that train a Mixtral on different tokens: `python loss_ranks_job.py OUT KIND`; rank 0 prints what
both ranks' losses were, by step."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers

import loopscope

STEPS, MICROBATCHES = 3, 2


def main(out: str, kind: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
            router_aux_loss_coef=0.1,
        )
    ).train()  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    found = []
    with loopscope.attach(model, out=out, every=1, num_microbatches=MICROBATCHES):
        for step in range(1, STEPS + 1):
            for microbatch in range(MICROBATCHES):
                if kind == "one raises" and (step, microbatch, rank) == (STEPS, 1, 1):
                    raise ValueError("no more data")
                ids = torch.randint(0, 32, (2, 6), generator=generator)
                output = model(input_ids=ids, labels=ids)
                found.append((step, float(output.loss.detach()), float(output.aux_loss.detach())))
    gathered: list[list[tuple[int, float, float]]] = [[], []]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        print("FOUND", json.dumps(gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
