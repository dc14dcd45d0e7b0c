"""Training with `transformers.Trainer`, for real."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parents[2] / "capture"))
from hf_models import FAMILIES, build  # noqa: E402

import loopscope  # noqa: E402
from loopscope.capture.hooks import RootHook  # noqa: E402
from loopscope.integrations.transformers import loopscope_callback  # noqa: E402


class Lines(torch.utils.data.Dataset[Any]):
    """Ten sequences of different length, padded on the right."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(12, dtype=torch.int64)
        length = 6 + index % 6
        ids[:length] = torch.arange(length) + 3 + index
        mask = (torch.arange(12) < length).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer(model: Any, out: Path, **options: Any) -> Any:
    arguments = hf.TrainingArguments(
        output_dir=str(out / "hf"), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    return hf.Trainer(model=model, args=arguments, train_dataset=Lines(), eval_dataset=Lines())


def ours(model: Any) -> list[Any]:
    """Hooks of loopscope; transformers leaves one of its own where it recomputes."""
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [
        hook for hook in hooks if isinstance(hook, RootHook) or "loopscope" in getattr(hook, "__module__", "")
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_training_through_the_callback(name: str, tmp_path: Path) -> None:
    model = build(name)
    recompute = {"gradient_checkpointing": True} if model.supports_gradient_checkpointing else {}
    runner = trainer(model, tmp_path, **recompute, eval_strategy="epoch")
    runner.add_callback(loopscope_callback(out=tmp_path / "run", on_error="raise"))
    runner.train()
    run = loopscope.open_run(tmp_path / "run")
    losses = run.arrow("loss").to_pylist()
    assert [row["step"] for row in losses] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]  # 5 forwards an epoch, in groups of 2, 2 and 1
    assert all(row["lr"] > 0 for row in losses)
    rows = run.arrow("router").to_pylist()
    assert {row["step"]: row["num_microbatches"] for row in rows} == {1: 2, 2: 2, 3: 1, 4: 2, 5: 2, 6: 1}
    layer = FAMILIES[name][1][-1]
    tokens = {row["step"]: row["num_tokens"] for row in rows if row["layer_idx"] == layer}
    per_epoch = [sum(tokens[step] for step in steps) for steps in ((1, 2, 3), (4, 5, 6))]
    assert per_epoch == [sum(6 + index % 6 for index in range(10))] * 2
    logged = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    assert [row["total_loss"] for row in losses] == pytest.approx(logged, abs=2e-3)
    assert not ours(model)


def test_hooks_are_gone_when_training_raises(tmp_path: Path) -> None:
    model = build("olmoe")

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyError("stop")

    with loopscope_callback(out=tmp_path / "run", on_error="raise") as callback:
        runner = trainer(model, tmp_path)
        runner.add_callback(callback)
        runner.add_callback(Stop())
        with pytest.raises(KeyError):
            runner.train()
    assert not ours(model)
    run = loopscope.open_run(tmp_path / "run")
    assert set(run.arrow("router")["step"].to_pylist()) == {1, 2}
