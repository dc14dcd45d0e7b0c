"""Lightning for real, where it is installed; the order of its calls everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from capture_models import EXPERTS, ids, make, plan
from torch import Tensor, nn

import loopscope
from loopscope.errors import ConfigError
from loopscope.integrations.lightning import loopscope_callback
from loopscope.integrations.lightning.callback import LightningSteps, observed

BATCHES = [ids(seed, batch=2) for seed in range(5)]


class Whole(nn.Module):
    """What a LightningModule is to a callback: a module with the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()


class Counted:
    """Tokens that each expert of the prelude really got, forward by forward of training."""

    def __init__(self, model: Any) -> None:
        self.counts: list[list[int]] = []
        model.prelude.moe.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.counts.append(torch.bincount(output[1][2].flatten(), minlength=EXPERTS).tolist())


def head_counts(folder: Path) -> list[list[int]]:
    run = loopscope.open_run(folder)
    rows = run.sql("SELECT expert_count FROM router WHERE unrolled_pos = 0 ORDER BY step").fetchall()
    return [row[0] for row in rows]


def summed(counts: list[list[int]], groups: list[int]) -> list[list[int]]:
    parts = iter(counts)
    return [
        [sum(column) for column in zip(*(next(parts) for _ in range(size)), strict=True)] for size in groups
    ]


def test_steps_are_what_lightning_accumulates(tmp_path: Path) -> None:
    """The calls of a trainer that accumulates two batches of five, and validates in between."""
    module = Whole().train()
    trainer = SimpleNamespace(global_step=0, world_size=1)
    callback = LightningSteps(tmp_path / "run", "net", every=1, plan=plan(), on_error="raise")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    counted = Counted(module.net)
    callback.on_train_start(trainer, module)
    losses = []
    for number, batch in enumerate(BATCHES):
        callback.on_train_batch_start(trainer, module, batch, number)
        loss = module.net(batch).square().mean() / 2
        loss.backward()
        losses.append(loss.item())
        if number in (1, 3, 4):
            callback.on_before_optimizer_step(trainer, module, optimizer)
            optimizer.step()
        callback.on_train_batch_end(trainer, module, {"loss": loss.detach()}, batch, number)
        if number == 2:
            module.eval()
            with torch.no_grad():
                module.net(batch)
            module.train()
    callback.on_train_end(trainer, module)
    assert head_counts(tmp_path / "run") == summed(counted.counts, [2, 2, 1])
    rows = loopscope.open_run(tmp_path / "run").arrow("loss").to_pylist()
    assert [row["total_loss"] for row in rows] == pytest.approx(
        [losses[0] + losses[1], losses[2] + losses[3], losses[4]]
    )
    assert [(row["step"], row["lr"]) for row in rows] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert callback.state_dict() == {"steps": 3}
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_a_training_that_raises_leaves_what_was_whole(tmp_path: Path) -> None:
    module = Whole().train()
    trainer = SimpleNamespace(global_step=7, world_size=1)
    callback = LightningSteps(tmp_path / "run", lambda whole: whole.net, every=1, plan=plan())
    callback.on_train_start(trainer, module)
    for number in range(2):
        callback.on_train_batch_start(trainer, module, BATCHES[0], number)
        loss = module.net(BATCHES[0]).square().mean()
        if number == 0:
            callback.on_before_optimizer_step(trainer, module, torch.optim.SGD(module.parameters(), lr=0.1))
        callback.on_train_batch_end(trainer, module, {"loss": loss.detach()}, BATCHES[0], number)
    callback.on_exception(trainer, module, KeyboardInterrupt())
    run = loopscope.open_run(tmp_path / "run")
    assert [row["step"] for row in run.arrow("loss").to_pylist()] == [8]
    assert run.sql("SELECT DISTINCT step FROM router").fetchall() == [(8,)]
    callback.on_train_start(trainer, module)  # a second fit goes on in the same run
    assert callback.run is not None
    assert (callback.run.step, callback.run.run_id) == (8, run.run_id)
    callback.on_train_end(trainer, module)


def test_the_part_that_is_observed() -> None:
    whole = Whole()
    assert observed(whole, None) is whole
    assert observed(whole, "net.core.0") is whole.net.core[0]
    with pytest.raises(ConfigError, match=r"part is 'nett', expected the name of a module in Whole"):
        observed(whole, "nett")


def test_a_callback_is_of_the_package_that_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    with pytest.raises(ConfigError, match="Lightning is not installed"):
        loopscope_callback(tmp_path)
    other = ModuleType("pytorch_lightning")
    other.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    assert isinstance(loopscope_callback(tmp_path), other.Callback)


@pytest.mark.long
@pytest.mark.parametrize("manual", [False, True])
def test_a_real_trainer(tmp_path: Path, manual: bool) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.automatic_optimization = not manual

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = self.net(batch).square().mean()
            if not manual:
                return loss
            self.manual_backward(loss)
            if batch_idx % 2 or batch_idx == len(BATCHES) - 1:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> Any:
            if manual:
                return [
                    torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net.core, self.net.prelude)
                ]
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    counted = Counted(module.net)
    plain: dict[str, Any] = {
        "max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "enable_checkpointing": False,
    }  # fmt: skip
    if not manual:
        plain |= {"accumulate_grad_batches": 2, "val_check_interval": 2, "gradient_clip_val": 1.0}
    callback = loopscope_callback(tmp_path / "run", every=1, part="net", plan=plan(), on_error="raise")
    trainer = lightning.Trainer(callbacks=[callback], **plain)
    loader = torch.utils.data.DataLoader(torch.stack(BATCHES), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    assert head_counts(tmp_path / "run") == summed(counted.counts, [2, 2, 1] * 2)
    rows = loopscope.open_run(tmp_path / "run").arrow("loss").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["lr"] == 0.01 for row in rows)
    if not manual:
        assert trainer.global_step == 6
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        again = loopscope_callback(
            tmp_path / "run", every=1, part="net", plan=plan(), on_error="raise", resume=True
        )
        lightning.Trainer(callbacks=[again], **{**plain, "max_epochs": 3}).fit(
            Module(), loader, loader, ckpt_path=tmp_path / "last.ckpt"
        )
        rows = loopscope.open_run(tmp_path / "run").arrow("loss").to_pylist()
        assert [row["step"] for row in rows] == list(range(1, 10))
