"""Model code as old checkpoints bundle it: a loop alone, and TracePoints without block, depth, E and k."""

from __future__ import annotations

import torch
from torch import nn

from loopscope.trace import ACTIVE_TRACE_SINK, TracePoint

STEPS, LAYERS, WIDTH, EXPERTS, VOCAB = 3, 2, 8, 5, 2048


class OldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.stack = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(LAYERS))

    def forward(self, ids):
        h = self.embed(ids)
        for step in range(STEPS):
            for layer in range(LAYERS):
                h = h + self.stack[layer](h).tanh()
                logits = self.gates[layer](h)
                probs = logits.softmax(-1)
                weights, idx = probs.topk(2)
                ACTIVE_TRACE_SINK.record(
                    TracePoint(
                        loop_step=step,
                        layer_idx=layer,
                        router_logits=logits.detach(),
                        router_probs=probs.detach(),
                        topk_idx=idx,
                        topk_weights=(weights / weights.sum(-1, keepdim=True)).detach(),
                        residual=h.detach(),
                    )
                )
        return self.lm_head(h)


def load(checkpoint):
    model = OldModel()
    model.load_state_dict(torch.load(checkpoint / "model.pt"))
    return model


def wrong(checkpoint):
    return {"not": "a module"}
