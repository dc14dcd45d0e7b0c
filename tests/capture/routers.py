"""Routers of every kind in one small mixture, whose experts are modules and can be asked what they were called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, EXPERTS, BATCH, SEQ = 16, 8, 3, 12
TOKENS = BATCH * SEQ

Routed = tuple[Tensor, Tensor, dict[str, Any]]
"""([N, E] bool where a token runs, [N, E] combine weights, what the mixture hands over)."""


class Mixture(nn.Module):
    """Runs experts on the tokens that `route` gives them and hands over what it returns."""

    def __init__(
        self, route: Callable[[Any, Tensor], Routed], experts: int = EXPERTS, logits: int = EXPERTS
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = nn.Linear(WIDTH, logits, bias=False)
        self.gate.weight.data = torch.randn(logits, WIDTH, generator=generator)
        self.gate.weight.data[:, 0] = 0.0  # the first feature is the token's number
        self.register_buffer("bias", torch.randn(logits, generator=generator) * 0.3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.route = route

    def forward(self, x: Tensor) -> dict[str, Any]:
        flat = x.reshape(-1, WIDTH)
        runs, gates, handed = self.route(self, flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = runs[:, number].nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * gates[rows, number, None])
        return {"h": x + out.reshape(x.shape), **handed}


class Layer(nn.Module):
    def __init__(self, route: Callable[[Any, Tensor], Routed], **sizes: int) -> None:
        super().__init__()
        self.moe = Mixture(route, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x)["h"]
        return out


class Oracle:
    """Tokens by number that each expert of a mixture was called with."""

    def __init__(self, mixture: Mixture) -> None:
        self.tokens: list[list[int]] = [[] for _ in mixture.experts]
        for number, expert in enumerate(mixture.experts):
            expert.register_forward_pre_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.tokens[number] += args[0][:, 0].long().tolist()

        return note

    def counts(self, valid: Tensor | None = None) -> list[int]:
        kept = torch.ones(TOKENS, dtype=torch.bool) if valid is None else valid.reshape(-1)
        return [int(kept[torch.tensor(each, dtype=torch.long)].sum()) for each in self.tokens]


def tokens(seed: int = 1) -> Tensor:
    x = torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[..., 0] = torch.arange(TOKENS).reshape(BATCH, SEQ)
    return x


def mask_of(idx: Tensor, experts: int = EXPERTS, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[N, E] bool and gates, of [N, k] indices; −1 is none."""
    runs = torch.zeros(len(idx), experts + 1, dtype=torch.bool)
    runs.scatter_(1, torch.where(idx < 0, experts, idx), True)
    gates = torch.zeros(len(idx), experts + 1)
    gates.scatter_(
        1, torch.where(idx < 0, experts, idx), torch.ones(idx.shape) if weights is None else weights
    )
    return runs[:, :experts], gates[:, :experts]


def top_k(
    score: Callable[[Tensor], Tensor],
    *,
    after: bool = False,
    bias: str | None = None,
    biased_weights: bool = False,
    groups: str | None = None,
    normalised: bool = True,
    k: int = 2,
) -> Callable[[Any, Tensor], Routed]:
    """Token choice in its variants."""

    def route(m: Any, x: Tensor) -> Routed:
        logits = m.gate(x)
        inner = logits + m.bias if bias == "logits" else logits
        scores = score(logits)
        by = inner if after else score(inner)
        if bias == "scores":
            by = by + m.bias
        chosen_by = by
        if groups is not None:
            grouped = by.reshape(len(x), 4, -1)
            worth = grouped.topk(2, -1).values.sum(-1) if groups == "top2_sum" else grouped.amax(-1)
            kept = torch.zeros_like(worth).scatter_(1, worth.topk(2, -1).indices, 1.0)
            by = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
        idx = by.topk(k, -1).indices
        if after:
            weights = score((inner if biased_weights else logits).gather(1, idx))
        else:
            weights = (chosen_by if biased_weights else scores).gather(1, idx)
        if normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return (*mask_of(idx, weights=weights), {"logits": logits, "idx": idx, "weights": weights})

    return route


def switch(capacity: int = 3) -> Callable[[Any, Tensor], Routed]:
    """Top-1 with a capacity within each sequence; one-hot, zero rows where a token found none."""

    def route(m: Any, x: Tensor) -> Routed:
        logits = m.gate(x)
        probs = logits.softmax(-1)
        hot = nn.functional.one_hot(probs.argmax(-1), EXPERTS).reshape(BATCH, SEQ, EXPERTS)
        hot = hot * (hot.cumsum(1) <= capacity)
        best = probs.amax(-1, keepdim=True)
        runs = hot.reshape(-1, EXPERTS) > 0
        return runs, runs * best, {"logits": logits, "hot": hot, "best": best.reshape(BATCH, SEQ, 1)}

    return route


def gshard(capacity: int = 6, *, before: bool = True) -> Callable[[Any, Tensor], Routed]:
    """Top-2 with a capacity over the batch, first choices first; weights normalised before or after dropping."""

    def route(m: Any, x: Tensor) -> Routed:
        logits = m.gate(x)
        weights, idx = logits.softmax(-1).topk(2, -1)
        hot = nn.functional.one_hot(idx, EXPERTS).transpose(0, 1).reshape(-1, EXPERTS)
        place = (hot.cumsum(0) - 1).mul(hot).sum(-1).reshape(2, -1).T
        kept = place < capacity
        shared = weights if before else weights * kept
        weights = weights / shared.sum(-1, keepdim=True).clamp_min(1e-9) * kept
        runs, gates = mask_of(torch.where(kept, idx, -1), weights=weights)
        slots = nn.functional.one_hot(place.clamp(max=capacity), capacity + 1)[..., :capacity]
        combine = torch.einsum(
            "nk,nke,nkc->nec", weights, nn.functional.one_hot(idx, EXPERTS).float(), slots.float()
        )
        return (
            runs,
            gates,
            {"logits": logits, "idx": idx, "kept": kept, "combine": combine, "weights": weights},
        )

    return route


def expert_choice(*, per_sequence: bool, capacity: int = 4) -> Callable[[Any, Tensor], Routed]:
    """Each expert takes the tokens that score highest with it."""

    def route(m: Any, x: Tensor) -> Routed:
        logits = m.gate(x)
        probs = logits.softmax(-1)
        by = probs.reshape(BATCH, SEQ, EXPERTS) if per_sequence else probs[None]
        gates, chosen = by.transpose(1, 2).topk(capacity, -1)  # [B, E, C]
        runs = (
            torch.zeros_like(by).transpose(1, 2).scatter(2, chosen, 1.0).transpose(1, 2).reshape(-1, EXPERTS)
            > 0
        )
        handed = {"logits": logits, "chosen": chosen, "gates": gates}
        if not per_sequence:
            handed = {"logits": logits, "chosen": chosen[0], "gates": gates[0]}
        return runs, runs * probs, handed

    return route


def top_p(m: Any, x: Tensor) -> Routed:
    """As many experts as make up 60% of the probability, four at most."""
    logits = m.gate(x)
    values, idx = (logits / 4).softmax(-1).topk(4, -1)
    idx = torch.where(values.cumsum(-1) - values < 0.6, idx, -1)
    runs, gates = mask_of(idx, weights=values)
    return runs, gates, {"logits": logits / 4, "idx": idx, "combine": gates}


def with_null_experts(m: Any, x: Tensor) -> Routed:
    """Six experts that compute, and two behind them that do not."""
    logits = m.gate(x)
    weights, idx = logits.softmax(-1).topk(3, -1)
    real = torch.where(idx < 6, idx, -1)
    return (*mask_of(real, experts=6, weights=weights), {"logits": logits, "idx": idx, "weights": weights})


def gumbel(m: Any, x: Tensor) -> Routed:
    """Two experts drawn without replacement; weights of the model's own."""
    logits = m.gate(x)
    noise = -torch.empty_like(logits).exponential_().log()
    idx = (logits + noise).topk(2, -1).indices
    weights = torch.full(idx.shape, 0.5)
    return (*mask_of(idx, weights=weights), {"logits": logits, "idx": idx, "weights": weights})


def hashed(m: Any, x: Tensor) -> Routed:
    """Experts by token number; weights from the scores."""
    logits = m.gate(x)
    first = x[:, 0].long() % EXPERTS
    idx = torch.stack([first, (first + 3) % EXPERTS], -1)
    weights = logits.sigmoid().gather(1, idx)
    weights = weights / weights.sum(-1, keepdim=True)
    return (*mask_of(idx, weights=weights), {"logits": logits, "idx": idx, "weights": weights})


def llama(m: Any, x: Tensor) -> Routed:
    """Scores over all experts, zero where not chosen; no indices anywhere."""
    logits = m.gate(x)
    values, idx = logits.topk(2, -1)
    gates = torch.full_like(logits, float("-inf")).scatter(1, idx, values).sigmoid()
    return gates > 0, gates, {"logits": logits, "gates": gates}


def hidden(m: Any, x: Tensor) -> Routed:
    """A choice that stays in local variables."""
    logits = m.gate(x)
    weights, idx = logits.softmax(-1).topk(2, -1)
    return (*mask_of(idx, weights=weights), {"logits": logits})


class Soft(nn.Module):
    """Soft MoE: every slot of every expert is a mixture of all tokens of a sequence."""

    def __init__(self, slots: int = 3) -> None:
        super().__init__()
        self.phi = nn.Parameter(
            torch.randn(EXPERTS, slots, WIDTH, generator=torch.Generator().manual_seed(0))
        )
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = torch.einsum("bnd,esd->bnes", x / x.norm(dim=-1, keepdim=True), self.phi)
        slots = torch.einsum("bnd,bnes->besd", x, logits.softmax(1))
        out = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], 1)
        combine = logits.flatten(2).softmax(-1).reshape(logits.shape)
        return {"h": x + torch.einsum("besd,bnes->bnd", out, combine), "logits": logits, "combine": combine}
