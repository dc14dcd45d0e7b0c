"""torchtitan's own MoE models through torchtitan's own trainer on CPU, with loopscope attached.

``torchrun ... moe_driver.py OUT TOKENIZER DATASET FAMILY...`` writes OUT/FAMILY.RANK.json: per step and layer
torchtitan's own `tokens_per_expert_E`, as it stood before its optimizer hook zeroed it.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loopscope.models import cpu_compat

cpu_compat.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models import deepseek_v3, gpt_oss, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.moe import MoE  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402

import loopscope  # noqa: E402
from loopscope.integrations.torchtitan.options import LoopscopeOptions  # noqa: E402
from loopscope.integrations.torchtitan.text import DATASET_NAME, register_dataset  # noqa: E402
from loopscope.integrations.torchtitan.trainer import LoopscopeTrainer  # noqa: E402


class CpuAttention(ScaledDotProductAttention):
    """Plain causal attention that also gives the log-sum-exp which gpt_oss rescales by."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, out_transform=None, **ignored):
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        return out if out_transform is None else out_transform(out, scores.logsumexp(-1).transpose(1, 2))


def spec_of(family: str) -> Any:
    """A debug flavour cut to three layers; deepseek_v3 with a sigmoid router, its bias and a scale."""
    module, flavor = {
        "deepseek_v3": (deepseek_v3, "debugmodel"),
        "qwen3": (qwen3, "debugmodel_moe"),
        "gpt_oss": (gpt_oss, "debugmodel"),
    }[family]
    spec = module.model_registry(flavor, attn_backend="varlen")
    spec.model.layers = spec.model.layers[:3]
    for layer in spec.model.layers:
        layer.attention.inner_attention = CpuAttention.Config()
        if layer.moe is not None:
            layer.moe.routed_experts.inner_experts.hidden_dim = (
                64  # what an expert computes does not matter here
            )
        if family == "deepseek_v3" and layer.moe is not None:
            router = layer.moe.router
            router.score_func, router.route_norm, router.route_scale = "sigmoid", True, 2.5
    return spec


def train(out: Path, tokenizer: str, dataset: str, family: str) -> None:
    """Trains; a family that ends in "@" is trained by LoopscopeTrainer, the others by torchtitan's own."""
    inside, kind = family.endswith("@"), family.removesuffix("@")
    config = qwen3_moe_debug()
    config.model_spec = spec_of(kind)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.hf_assets_path = tokenizer
    config.dump_folder = str(out / f"{family}-dump")
    register_dataset(DATASET_NAME, dataset)
    config.dataloader.dataset, config.dataloader.dataset_path = DATASET_NAME, dataset
    config.training.steps, config.training.local_batch_size, config.training.seq_len = 3, 2, 32
    config.training.global_batch_size = 4 * dist_size()
    # gpt_oss adds its experts' biases in bfloat16 whatever the parameters are.
    config.training.mixed_precision_param = "bfloat16" if kind == "gpt_oss" else "float32"
    config.training.disable_cuda_graphs = True
    config.checkpoint.enable = False
    config.activation_checkpoint = FullAC.Config()
    config.debug = DebugConfig(seed=3, enable_structured_logging=False)
    if inside:
        options = LoopscopeOptions(out=str(out / family), probe_every=0, on_error="raise")
        named = {item.name: getattr(config, item.name) for item in fields(config) if item.init}
        config = LoopscopeTrainer.Config(**named, loopscope=options)
    trainer = config.build()
    model = trainer.model_parts[0]
    cpu_compat.prepare_fsdp(model)
    routers = {name: part for name, part in model.named_modules() if isinstance(part, MoE)}
    counts: list[dict[str, list[int]]] = []

    def keep(*args: Any) -> None:
        counts.append({name: part.tokens_per_expert_E.long().tolist() for name, part in routers.items()})

    # First in line, before the hook that reads the counts for the expert bias and zeroes them.
    container = trainer.optimizers
    container.register_step_pre_hook(keep)
    container._optimizer_step_pre_hooks.move_to_end(
        next(reversed(container._optimizer_step_pre_hooks)), last=False
    )
    try:
        attached = (
            nullcontext()
            if inside
            else loopscope.attach(
                model,
                out=out / family,
                num_microbatches=trainer.gradient_accumulation_steps,
                on_error="raise",
            )
        )
        with attached:
            trainer.train()
    finally:
        trainer.close()
    (out / f"{family}.{dist.get_rank()}.json").write_text(json.dumps(counts))


def dist_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def share_meshes() -> None:
    """One set of meshes per process: it knows its meshes by identity, so a second set does not fit the first."""
    known: list[Any] = []
    fresh = torchtitan.trainer.Trainer.init_distributed

    def init_distributed(trainer: Any) -> Any:
        if not known:
            known.append(fresh(trainer))
        return known[0]

    torchtitan.trainer.Trainer.init_distributed = init_distributed


def main() -> None:
    share_meshes()
    torchtitan.trainer.time.sleep = lambda seconds: None  # type: ignore[attr-defined]
    out, tokenizer, dataset, *families = sys.argv[1:]
    for family in families:
        train(Path(out), tokenizer, dataset, family)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
