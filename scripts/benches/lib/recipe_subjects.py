"""Small models of other people's packages, with random weights, and hooks of our own on what they compute.

Each subject trains one step on random tokens and notes, in the order of execution, what every block returned and what
every expert was handed. Nothing here reads a router.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, BATCH, LENGTH = 61, 32, 2, 16


@dataclass
class Visit:
    """What one block should have in its rows."""

    norms: list[float]
    """Norm of each token."""
    counts: list[int] | None = None
    """Assignments that reached each expert; None for a dense block."""
    top_k: int = 0
    mass: list[float] | None = None
    """Share of each expert in the combine weights, where routing is soft and counts nothing."""
    block: str = "loop"
    loop_step: int | None = 0


@dataclass
class Subject:
    """A model with our own hooks."""

    model: Any
    loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Of tokens [B, S]."""
    places: Callable[[list[Visit]], None] = lambda visits: None
    """Says block and loop step of the visits of one forward, where they are not one pass of one loop."""
    visits: list[Visit] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    """Assignments since the last block."""
    masses: list[float] | None = None
    """Shares of experts since the last block, where routing is soft."""
    step: Callable[[Any], float] | None = None
    """One training step, for what is no torch model."""

    def block(self, module: nn.Module, top_k: int = 0, take: Callable[[Any, Any], Any] | None = None) -> None:
        """Note what a block returned, or what `take` finds in its arguments and output, at each call."""

        def hook(module: Any, args: Any, output: Any) -> None:
            self.end(output if take is None else take(args, output), top_k)

        module.register_forward_hook(hook)

    def end(self, hidden: torch.Tensor, top_k: int = 0) -> None:
        """A block has ended."""
        norms = hidden.detach().double().norm(dim=-1).flatten().tolist()
        counts = list(self.seen) if top_k and self.masses is None else None
        self.visits.append(Visit(norms, counts, top_k, self.masses))
        self.seen, self.masses = [0] * len(self.seen), None

    def experts(self, experts: Any) -> None:
        """Count the rows that each expert is handed; a row of zeros is an empty place."""
        self.seen = [0] * len(experts)
        for number, expert in enumerate(experts):

            def hook(module: Any, args: Any, number: int = number) -> None:
                self.seen[number] += int((args[0] != 0).any(dim=-1).sum())

            expert.register_forward_pre_hook(hook)

    def train(self, ids: torch.Tensor, optimizer: Any) -> float:
        """One step; the loss."""
        self.visits.clear()
        assert self.loss is not None
        loss = self.loss(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.places(self.visits)
        return float(loss.detach())


def _shifted(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _scrambled(model: Any, std: float = 0.2) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)
    return model.train()


def open_mythos() -> Subject:
    from open_mythos.main import MythosConfig, OpenMythos

    config = MythosConfig(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=LENGTH,
        max_loop_iters=3,
        prelude_layers=2,
        coda_layers=1,
        attn_type="gqa",
        n_experts=6,
        n_shared_experts=1,
        n_experts_per_tok=2,
        expert_dim=16,
        lora_rank=4,
    )
    subject = Subject(model := _scrambled(OpenMythos(config), 0.1))
    moe = model.recurrent.block.ffn
    nn.init.normal_(moe.router.weight, std=0.5)
    nn.init.normal_(moe.router_bias)  # as a balancing loop would leave it
    subject.loss = lambda ids: _shifted(model(ids), ids)
    subject.experts(moe.routed_experts)
    for layer in (*model.prelude, *model.coda):
        subject.block(layer)
    subject.block(model.recurrent.block, top_k=2)

    def places(visits: list[Visit]) -> None:
        # The loop ends early where every token has halted.
        for number, visit in enumerate(visits):
            depth = number - 2
            visit.block = "head" if depth < 0 else "tail" if visit is visits[-1] else "loop"
            visit.loop_step = depth if visit.block == "loop" else None

    subject.places = places
    return subject


def log_depth_recurrent_modeling() -> Subject:
    from log_depth_recurrent_modeling import ARGRC

    subject = Subject(model := ARGRC(num_tokens=VOCABULARY, dim=WIDTH, depth=3, prenorm=True).train())
    subject.loss = lambda ids: model(ids, return_loss=True)
    for module in (*model.layers, model.norm):
        subject.block(module, take=lambda args, output: args[0])
    return subject


def rlt_pytorch() -> Subject:
    from RLT import RLT

    model = RLT(
        WIDTH,
        enc_depth=2,
        dec_depth=2,
        num_tokens=VOCABULARY,
        dim_head=8,
        heads=4,
        recurrent_block_size=4,
    ).train()
    subject = Subject(model)
    subject.loss = lambda ids: model(ids, return_loss=True)
    subject.block(model.encoder, take=lambda args, output: output.tokens)
    subject.block(model.to_logits, take=lambda args, output: args[0])
    return subject


def spiral_lm() -> Subject:
    from spiral.config import SpiralConfig
    from spiral.model import SpiralCore

    config = SpiralConfig(
        vocab_size=VOCABULARY,
        emb_factor=16,
        d_model=WIDTH,
        n_heads=4,
        d_ff=48,
        max_seq_len=LENGTH,
        mean_iters=6,
        truncated_bptt_k=4,
    )
    subject = Subject(model := _scrambled(SpiralCore(config)))
    subject.loss = lambda ids: _shifted(model(ids, n_iters=6), ids)
    core = model._step_core

    def noted(*args: Any) -> Any:
        state = core(*args)
        subject.end(state[0])
        return state

    model._step_core = noted
    subject.places = _passes
    return subject


def _passes(visits: list[Visit]) -> None:
    for number, visit in enumerate(visits):
        visit.loop_step = number


def latent_moe() -> Subject:
    from latent_moe import MoETransformer, TransformerConfig

    config = TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_layers=2,
        n_heads=4,
        max_seq_len=LENGTH,
        d_ff=24,
        n_experts=4,
        top_k=2,
        alpha=2,
        device="cpu",
    )
    subject = Subject(model := _scrambled(MoETransformer(config)))
    subject.loss = lambda ids: model(ids[:, :-1], ids[:, 1:])[1]
    for block in model.blocks:
        subject.experts(block.moe.experts)
        subject.block(block, top_k=block.moe.config.top_k_scaled)
    return subject


def mixturekit() -> Subject:
    import transformers as hf
    from MixtureKit import build_moe

    folder = Path(tempfile.mkdtemp())
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    experts = []
    for number in range(3):
        hf.Qwen3ForCausalLM(config).save_pretrained(path := folder / f"expert{number}")
        experts.append({"expert_name": f"expert{number}", "model_id": str(path)})
    merge = {
        "moe_method": "traditional",
        "model_type": "merged",
        "num_experts_per_tok": 2,
        "experts": experts,
        "alpha": 0.01,
    }
    built = build_moe(merge, torch_dtype=torch.float32, output_dir=str(folder / "merged"))
    loaded = hf.AutoModelForCausalLM.from_pretrained(built, trust_remote_code=True)
    subject = Subject(model := _scrambled(loaded))
    subject.loss = lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss
    for layer in model.model.layers:
        subject.experts(layer.mlp.experts)
        subject.block(layer, top_k=2)
    return subject


class Stack(nn.Module):
    """Blocks of a package between an embedding and a head, for packages that give no whole model."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the sum of what blocks return behind their hidden states."""
        hidden, aux = self.embedding(ids), torch.zeros(())
        for block in self.blocks:
            out = block(hidden)
            hidden, aux = (out[0], aux + out[1]) if isinstance(out, tuple) else (out, aux)
        return self.head(hidden), aux


def _stacked(model: Stack) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits, aux = model(ids)
        return _shifted(logits, ids) + aux

    return loss


def st_moe_pytorch() -> Subject:
    from st_moe_pytorch import MoE, SparseMoEBlock

    blocks = [
        SparseMoEBlock(MoE(dim=WIDTH, num_experts=5, gating_top_n=3, capacity_factor_train=1.0))
        for _ in range(2)
    ]
    subject = Subject(model := Stack(blocks).train())
    subject.loss = _stacked(model)
    for block in model.blocks:
        nn.init.normal_(block.moe.gate.to_gates.weight)
        subject.experts(block.moe.experts.experts)
        subject.block(block, top_k=3, take=lambda args, output: output[0])
    return subject


class Added(nn.Module):
    """A MoE with a residual around it, as the package's README has it."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, aux = self.moe(hidden)
        return hidden + out, aux


def mixture_of_experts() -> Subject:
    from mixture_of_experts import MoE

    model = Stack([Added(MoE(dim=WIDTH, num_experts=6)) for _ in range(2)]).train()
    subject = Subject(model)
    subject.loss = _stacked(model)
    for block in model.blocks:
        block.moe.experts.register_forward_pre_hook(_handed(subject))
        subject.block(block, top_k=2, take=lambda args, output: output[0])
    return subject


def _handed(subject: Subject) -> Callable[..., None]:
    def hook(module: Any, args: Any) -> None:
        # [E, B·C, d]; a place that nobody was sent to is zero.
        subject.seen = (args[0] != 0).any(dim=-1).sum(dim=-1).tolist()

    return hook


def soft_mixture_of_experts() -> Subject:
    from soft_mixture_of_experts.transformer import SoftMoEEncoder, SoftMoEEncoderLayer

    layer = SoftMoEEncoderLayer(
        WIDTH, 4, dim_feedforward=24, num_experts=4, slots_per_expert=3, norm_first=True
    )
    subject = Subject(model := Stack([SoftMoEEncoder(layer, num_layers=2)]).train())
    subject.loss = _stacked(model)
    for each in model.blocks[0].layers:
        nn.init.normal_(each.moe.phi, std=0.5)
        each.moe.register_forward_pre_hook(_shared(subject))
        subject.block(each, top_k=4)
    return subject


def _shared(subject: Subject) -> Callable[..., None]:
    def hook(module: Any, args: Any) -> None:
        scores = torch.einsum("bmd,dnp->bmnp", args[0].detach().double(), module.phi.detach().double())
        weights = scores.flatten(2).softmax(-1).unflatten(2, scores.shape[2:]).sum(-1)
        subject.masses = weights.flatten(0, 1).mean(0).tolist()

    return hook


def nanbeige_mlx() -> Subject:
    import mlx.core as mx
    import mlx.nn as mnn
    import mlx.optimizers as optimizers
    from nanbeige_mlx.model import Model, ModelArgs, TransformerBlock

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    args = ModelArgs("nanbeige", WIDTH, 2, 48, 4, 2, 8, 1e-5, VOCABULARY, num_loops=2)
    model = Model(args)
    mx.eval(model.parameters())
    subject = Subject(model)
    noted: list[Any] = []

    class Noted(TransformerBlock):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            noted.append(mx.stop_gradient(output))
            return output

    for layer in model.model.layers:
        layer.__class__ = Noted

    def loss(model: Any, ids: Any) -> Any:
        return mnn.losses.cross_entropy(model(ids)[:, :-1], ids[:, 1:]).mean()

    gradient = mnn.value_and_grad(model, loss)
    optimizer = optimizers.SGD(learning_rate=0.1)

    def step(ids: torch.Tensor) -> float:
        noted.clear()
        value, gradients = gradient(model, mx.array(ids.tolist()))
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), noted)
        subject.visits.clear()
        for hidden in noted:
            subject.end(torch.tensor(hidden.tolist()))
        for number, visit in enumerate(subject.visits):
            visit.loop_step = number // 2
        return float(value.item())

    subject.step = step
    return subject


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "open-mythos": open_mythos,
    "log-depth-recurrent-modeling": log_depth_recurrent_modeling,
    "rlt-pytorch": rlt_pytorch,
    "spiral-lm": spiral_lm,
    "latent-moe": latent_moe,
    "st-moe-pytorch": st_moe_pytorch,
    "mixture-of-experts": mixture_of_experts,
    "soft-mixture-of-experts": soft_mixture_of_experts,
    "mixturekit": mixturekit,
    "nanbeige-mlx": nanbeige_mlx,
}
