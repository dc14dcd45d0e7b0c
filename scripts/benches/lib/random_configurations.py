"""Random trainings of small MoEs: what is drawn, and how its model and its batches are built.

Everything of a configuration follows from the seed and its number alone, so that one can be run again by its number.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from random_families import KINDS, LOOPED, OTHERS, REVIEWED, VOCABULARY, build_family, drawn_options
from random_masks import PACKED, SIMPLE, SQUARE, arguments, validity

STEPS = 4
DTYPES = ("fp32", "bf16", "autocast", "fp16")
CHECKPOINTS = ("none", "model", "layers-reentrant", "layers")
TOLD = ("counted", "begin_step", "begin_step and number", "optimizer")
UPDATES = ("plain", "plain", "plain", "scaler", "closure", "two optimizers", "in backward", "lbfgs")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training."""

    number: int
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the model's own configuration."""
    dtype: str = "fp32"
    mask: str = "none"
    microbatches: tuple[int, ...] = (1,) * STEPS
    """Forwards of each step."""
    told: str = "counted"
    """How loopscope learns which step a forward belongs to."""
    update: str = "plain"
    """How gradients become an update."""
    checkpoint: str = "none"
    ranks: int = 1
    parallel: str = "all-reduce"
    """How ranks share gradients: "ddp", "fsdp", or "all-reduce" in the loop."""
    evaluates: str = ""
    """Forwards that are none of training: "between steps" (eval mode), "between microbatches" (no gradients)."""
    fails: str = ""
    """One forward raises, and the loop tries again: "within" a layer, or "behind" the last one."""
    loss: str = "model"
    """Whose loss it is: the "model"'s own, or the "loop"'s, with label smoothing."""
    resumes: bool = False
    """The attachment ends behind step 2, and another one goes on with its run."""
    ragged: bool = False
    """Microbatches differ in B and S."""
    batch: tuple[int, int] = (2, 12)
    """B, S."""

    @property
    def is_strict(self) -> bool:
        """Every row has its place said; else rows are compared in their order."""
        return self.family not in OTHERS

    def __str__(self) -> str:
        default = Configuration(number=0, family="")
        said = {k: v for k, v in asdict(self).items() if v != getattr(default, k)}
        return f"#{said.pop('number', 0)} {said.pop('family')} " + " ".join(
            f"{k}={v!r}" for k, v in said.items()
        )


def drawn(number: int, seed: int, families: tuple[str, ...] = ()) -> Configuration:
    """Configuration `number` of `seed`."""
    dice = random.Random(f"{seed}/{number}")
    weights = [8 if name in REVIEWED else 16 if name == LOOPED else 1 for name in KINDS]
    family = dice.choice(families) if families else dice.choices(KINDS, weights)[0]
    options = drawn_options(family, dice)
    reviewed = family in REVIEWED
    mask = dice.choice(SIMPLE + SQUARE + (PACKED,) if reviewed else SIMPLE)
    if mask == PACKED and not REVIEWED[family].packs:
        mask = "none"
    # transformers' balancing loss reads masks [B, S] alone.
    if mask in SQUARE:
        options.pop("output_router_logits", None)
    ranks = 2 if dice.random() < 0.2 else 1
    recomputes = family == LOOPED or (reviewed and REVIEWED[family].recomputes)
    checkpoint = dice.choice(CHECKPOINTS if recomputes else ("none", "model"))
    update = dice.choice(UPDATES) if ranks == 1 else "plain"
    told = dice.choice(TOLD)
    dtype = dice.choice(DTYPES)
    if update == "lbfgs":
        told = "optimizer"  # nobody knows before how often it calls its closure
        dtype = "fp32"
    elif update == "in backward":
        told = dice.choice(("counted", "begin_step"))
    if update == "scaler":
        dtype = "fp32" if dtype == "fp16" else dtype  # a scaler refuses gradients in half precision
    count = dice.choice((1, 1, 2, 3))
    counts = tuple(dice.choice((1, 2, 3)) for _ in range(STEPS))
    if update == "in backward":
        count, counts = 1, (1,) * STEPS
    # DistributedDataParallel refuses parameters whose gradient a reentrant recompute makes twice.
    parallel = ["all-reduce"]
    if ranks == 2 and checkpoint in ("none", "layers"):
        parallel += ["ddp"]
    if ranks == 2 and checkpoint == "none" and dtype in ("fp32", "bf16") and reviewed:
        parallel += ["fsdp"]
    return Configuration(
        number=number,
        family=family,
        options=options,
        dtype=dtype,
        mask=mask,
        microbatches=(count,) * STEPS if told == "counted" else counts,
        told=told,
        update=update,
        checkpoint=checkpoint,
        ranks=ranks,
        parallel=dice.choice(parallel),
        evaluates=dice.choice(("", "", "between steps", "between microbatches")),
        fails=dice.choice(("", "", "", "", "within", "behind")) if ranks == 1 else "",
        loss=dice.choice(("model", "model", "loop")) if reviewed else "loop",
        # Forwards of a skipped update are in no attachment that ends behind it.
        resumes=dice.random() < 0.1 and update != "scaler",
        ragged=dice.random() < 0.3,
        batch=(dice.choice((1, 2, 3)), dice.choice((5, 12, 17))),
    )


def build(configuration: Configuration) -> Any:
    """The model, with random weights that depend on the number alone, in training mode."""
    torch.manual_seed(configuration.number)
    model = build_family(configuration.family, configuration.options)
    if configuration.dtype in HALF:
        model = model.to(HALF[configuration.dtype])
        for part in model.modules():  # what the model says must stay in float32
            kept = {*(getattr(part, "_keep_in_fp32_modules", None) or ()),
                    *(getattr(part, "_keep_in_fp32_modules_strict", None) or ())}  # fmt: skip
            for name, parameter in part.named_parameters() if kept else ():
                if any(word in name for word in kept):
                    parameter.data = parameter.data.float()
    if configuration.checkpoint.startswith("layers"):
        reentrant = configuration.checkpoint == "layers-reentrant"
        if configuration.family == LOOPED:
            model.recomputed = reentrant
        else:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward, and which of its tokens are no padding ([B, S] bool)."""

    arguments: Mapping[str, Any]
    valid: torch.Tensor
    labels: torch.Tensor
    """[B, S], -100 at padding."""


def batches(configuration: Configuration, rank: int) -> list[list[Batch]]:
    """Every batch of a rank, by step and microbatch."""
    generator = torch.Generator().manual_seed(configuration.number * 2 + rank)
    passes = random.Random(configuration.number)
    found = []
    for count in configuration.microbatches:
        # Ranks that merge need one depth; on one rank each microbatch may have its own.
        depth = passes.randint(1, configuration.options.get("most", 1))
        group = []
        for _ in range(count):
            if configuration.ranks == 1:
                depth = passes.randint(1, configuration.options.get("most", 1))
            group.append(_batch(configuration, generator, depth))
        found.append(group)
    return found


def _batch(configuration: Configuration, generator: torch.Generator, depth: int) -> Batch:
    size, length = configuration.batch
    if configuration.ragged:
        size = int(torch.randint(1, 4, (), generator=generator))
        length = int(torch.randint(4, 18, (), generator=generator))
    ids = torch.randint(3, VOCABULARY - 4, (size, length), generator=generator)
    valid = validity(configuration.mask, size, length, generator)
    dtype = HALF.get(configuration.dtype, torch.float32)
    given = {
        "input_ids": ids,
        **arguments(configuration.mask, valid, dtype, configuration.family == "gpt_oss"),
    }
    labels = ids.masked_fill(~valid, -100)
    if configuration.loss == "model":
        given["labels"] = labels
    if configuration.family == LOOPED:
        given["passes"] = depth
    return Batch(given, valid, labels)
