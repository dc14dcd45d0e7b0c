"""Hooks beside fully_shard, in either order, in one process that is a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capture_models import Recurrent, ids, make, plan, train_step

import loopscope


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def shard(model: Recurrent, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in (model.prelude, *model.core, model.coda):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("order", ["sharded, then attached", "attached, then sharded"])
def test_fully_shard_in_either_order_gives_every_row(order: str, mesh: Any, tmp_path: Path) -> None:
    plain, model = make(), make()
    if order.startswith("sharded"):
        shard(model, mesh)
    with loopscope.attach(plain, out=tmp_path / "plain", plan=plan(), on_error="raise"):
        train_step(plain)
    with loopscope.attach(model, out=tmp_path / "run", plan=plan(), on_error="raise") as run:
        if order.startswith("attached"):
            shard(model, mesh)
        train_step(model)
        with torch.no_grad():
            model(ids())
        assert run.step == 1
    expected, found = (
        loopscope.open_run(tmp_path / name).arrow("router")["expert_count"].to_pylist()
        for name in ("plain", "run")
    )
    assert len(found) == 8
    assert found == expected
    assert not any("loopscope" in getattr(hook, "__module__", "") for part in model.modules()
                   for hook in part._forward_hooks.values())  # fmt: skip
