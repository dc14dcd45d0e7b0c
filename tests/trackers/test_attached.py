"""Trackers of models that were not written for loopscope."""

import pytest
import torch
from tracker_helpers import events, history

import loopscope

hf = pytest.importorskip("transformers")

from hf_models import build  # noqa: E402


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def scalars(row):
    return {key for key in row if key != "_step" and not key.startswith("loopscope/visits/")}


def test_a_transformers_model_has_few_keys_and_values_of_its_rows(tmp_path):
    model = build("qwen3_moe").train()
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with loopscope.attach(model, out=tmp_path / "run", on_error="raise", trackers=("wandb", "tensorboard")):
        for _ in range(4):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
    run, rows = loopscope.open_run(tmp_path / "run"), history(tmp_path)
    for key, sql in {
        "loss/total": "select step, total_loss from loss order by 1",
        "moe/maxvio_max": "select step, max(maxvio_count) from router group by 1 order by 1",
    }.items():
        expected = run.sql(sql).fetchall()
        assert [(row["loopscope/step"], row[key]) for row in rows if key in row] == expected
        found = events(tmp_path / "run" / "tensorboard").Scalars(key)
        assert [event.step for event in found] == [step for step, _ in expected]
    assert len({key for row in rows for key in scalars(row)}) <= 60


def test_a_hugging_face_trainers_own_wandb_run_is_shared(tmp_path):
    from transformers import Trainer, TrainingArguments

    from loopscope.integrations.transformers import loopscope_callback

    args = TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=6, per_device_train_batch_size=2, logging_steps=2,
        report_to=["wandb"], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    callback = loopscope_callback(out=tmp_path / "run", on_error="raise", trackers=("wandb",))
    trainer = Trainer(model=build("qwen3_moe"), args=args, train_dataset=Texts(), callbacks=[callback])
    import wandb

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_DIR", str(tmp_path))
        wandb.teardown()
        trainer.train()
        wandb.finish()
    rows = history(tmp_path)
    assert len(list(tmp_path.glob("**/*.wandb"))) == 1
    assert [row["loopscope/step"] for row in rows if "loss/total" in row] == list(range(1, 7))
    assert len([row for row in rows if "train/loss" in row]) == 3


def test_a_tracker_that_does_not_exist_is_refused_before_anything_is_attached(tmp_path):
    model = build("qwen3_moe")
    with pytest.raises(loopscope.errors.ConfigError, match="'wandbx', expected some of tensorboard, wandb"):
        loopscope.attach(model, out=tmp_path / "run", trackers=("wandbx",))
    assert not (tmp_path / "run").exists()
