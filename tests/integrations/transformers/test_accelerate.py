"""Loops of accelerate's own: prepared optimizers, groups of batches, weights that are elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build
from torch.utils.data import DataLoader
from trainers import Lines

import loopscope

accelerate = pytest.importorskip("accelerate")


def handed(model: Any) -> list[torch.Tensor]:
    """The choice [tokens, k] that the first experts module is handed, call by call."""
    calls: list[torch.Tensor] = []
    first = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    first.register_forward_pre_hook(lambda module, args: calls.append(args[1].detach().reshape(-1, 2)))
    return calls


def counts_of(folder: Path) -> list[list[int]]:
    found = loopscope.open_run(folder).sql(
        "SELECT expert_count FROM router WHERE layer_idx = (SELECT min(layer_idx) FROM router) ORDER BY step"
    )
    return [row[0] for row in found.fetchall()]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_group_ends_with_the_prepared_optimizers_update(tmp_path: Path, precision: str) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, mixed_precision=precision, cpu=True)
    plain = build("qwen3_moe").train()
    calls, masks = handed(plain), []
    model, optimizer, batches = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=1e-2), DataLoader(Lines(), batch_size=2)
    )
    with loopscope.attach(model, out=tmp_path, every=1, optimizer=optimizer, on_error="raise"):
        for batch in batches:  # five, in groups of 2, 2 and 1
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            masks.append(batch["attention_mask"].flatten().bool())
    chosen = [call[mask].flatten() for call, mask in zip(calls, masks, strict=True)]
    experts = plain.config.num_experts
    groups = [torch.cat(chosen[start : start + 2]) for start in (0, 2, 4)]
    assert counts_of(tmp_path) == [torch.bincount(group, minlength=experts).tolist() for group in groups]
    accelerate.state.AcceleratorState._reset_state(True)


def test_weights_that_are_offloaded_are_no_reason_to_stop(tmp_path: Path) -> None:
    model = build("qwen3_moe").train()
    calls = handed(model)
    accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    batch = {name: value[None] for name, value in Lines()[0].items()}
    with loopscope.attach(model, out=tmp_path, every=1, on_error="raise"):
        model(**batch)
    mask = batch["attention_mask"].flatten().bool()
    expected = torch.bincount(calls[0][mask].flatten(), minlength=model.config.num_experts)
    assert counts_of(tmp_path) == [expected.tolist()]
