"""Training with `transformers.Trainer`, for real."""

from pathlib import Path
from typing import Any

import pytest
from hf_models import FAMILIES, build
from trainers import Groups, Lines, Stream, arguments, groups_of, hf, ours

import loopscope
from loopscope.integrations.transformers import loopscope_callback


@pytest.mark.parametrize("name", FAMILIES)
def test_training_through_the_callback(name: str, tmp_path: Path) -> None:
    model = build(name)
    recompute = {"gradient_checkpointing": True} if model.supports_gradient_checkpointing else {}
    options = arguments(
        tmp_path,
        num_train_epochs=2,
        eval_strategy="epoch",
        include_num_input_tokens_seen="non_padding",
        **recompute,
    )
    runner = hf.Trainer(model=model, args=options, train_dataset=Lines(), eval_dataset=Lines())
    runner.add_callback(loopscope_callback(out=tmp_path / "run", on_error="raise"))
    runner.train()
    run = loopscope.open_run(tmp_path / "run")
    losses = run.arrow("loss").to_pylist()
    # 5 forwards an epoch, in groups of 2, 2 and 1
    assert [row["step"] for row in losses] == [1, 2, 3, 4, 5, 6]
    assert all(row["lr"] > 0 for row in losses)
    rows = run.arrow("router").to_pylist()
    assert {row["step"]: row["num_microbatches"] for row in rows} == {1: 2, 2: 2, 3: 1, 4: 2, 5: 2, 6: 1}
    layer = FAMILIES[name][1][-1]
    tokens = {row["step"]: row["num_tokens"] for row in rows if row["layer_idx"] == layer}
    per_epoch = [sum(tokens[step] for step in steps) for steps in ((1, 2, 3), (4, 5, 6))]
    assert per_epoch == [sum(6 + index % 6 for index in range(10))] * 2
    assert [row["tokens_seen"] for row in losses] == [sum(list(tokens.values())[: n + 1]) for n in range(6)]
    logged = [entry for entry in runner.state.log_history if "loss" in entry]
    assert [row["total_loss"] for row in losses] == pytest.approx(
        [entry["loss"] for entry in logged], rel=1e-6
    )
    assert [row["grad_norm"] for row in losses] == pytest.approx([e["grad_norm"] for e in logged], rel=1e-6)
    # The trainer's own loss against the sum of what the model's output says: two measurements.
    assert [row["closure_error"] for row in losses] == pytest.approx([0.0] * 6, abs=1e-5)
    assert not ours(model)
    assert "training_step" not in vars(runner)


def test_hooks_are_gone_when_training_raises(tmp_path: Path) -> None:
    model = build("olmoe")

    class Stop(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyError("stop")

    with loopscope_callback(out=tmp_path / "run", on_error="raise") as callback:
        runner = hf.Trainer(
            model=model, args=arguments(tmp_path, num_train_epochs=2), train_dataset=Lines(),
            callbacks=[callback, Stop()],
        )  # fmt: skip
        with pytest.raises(KeyError):
            runner.train()
    assert not ours(model)
    run = loopscope.open_run(tmp_path / "run")
    assert set(run.arrow("router")["step"].to_pylist()) == {1, 2}


def test_groups_of_a_stream_are_those_of_the_optimizer(tmp_path: Path) -> None:
    model = build("olmoe")
    groups = Groups(model)
    options = arguments(tmp_path, per_device_train_batch_size=1, max_steps=6)
    hf.Trainer(
        model=model, args=options, train_dataset=Stream(5),
        callbacks=[loopscope_callback(out=tmp_path / "run", on_error="raise"), groups],
    ).train()  # fmt: skip
    # What an epoch leaves over goes into the first step of the next one.
    assert [forwards for forwards, _ in groups.steps] == [2, 2, 3, 2, 3, 2]
    assert groups_of(loopscope.open_run(tmp_path / "run")) == groups.steps


def test_a_resume_within_an_epoch(tmp_path: Path) -> None:
    options = arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    hf.Trainer(model=build("olmoe"), args=options, train_dataset=Lines()).train()
    model = build("olmoe")
    groups = Groups(model)
    runner = hf.Trainer(
        model=model, args=arguments(tmp_path, max_steps=3), train_dataset=Lines(),
        callbacks=[loopscope_callback(out=tmp_path / "run", on_error="raise"), groups],
    )  # fmt: skip
    runner.train(resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-1"))
    run = loopscope.open_run(tmp_path / "run")
    assert [forwards for forwards, _ in groups.steps] == [2, 1]
    assert groups_of(run) == groups.steps
    assert run.arrow("loss")["step"].to_pylist() == [2, 3]


class OutOfMemory(hf.Trainer):  # type: ignore[misc]
    """Runs out of memory once, in the second microbatch of step 2, where sequences come in fours."""

    calls = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.calls += 1
        if inputs["input_ids"].shape[0] == 4 and self.calls == 4:
            raise RuntimeError("CUDA out of memory. simulated")
        return loss


def test_a_trainer_that_begins_again_goes_on_in_the_same_run(tmp_path: Path) -> None:
    model = build("olmoe")
    groups = Groups(model)
    options = arguments(tmp_path, per_device_train_batch_size=4, auto_find_batch_size=True, max_steps=2)
    callback = loopscope_callback(out=tmp_path / "run", on_error="raise")
    runner = OutOfMemory(model=model, args=options, train_dataset=Lines(16), callbacks=[callback, groups])
    runner.train()
    run = loopscope.open_run(tmp_path / "run")
    assert runner.state.global_step == 2
    assert {row["attempt"] for row in run.arrow("router").to_pylist()} == {2}
    # The first attempt's second step ended in its second forward; the Groups of the trainer go on with what it left.
    tokens = [tokens for _, tokens in groups_of(run)]
    assert tokens[1] == groups.steps[-1][1]
    assert run.arrow("loss")["step"].to_pylist() == [1, 2]
    health = run.arrow("health", live=False).to_pylist()
    dropped = [row for row in health if row["event"] == "trace_incomplete"]
    assert [(row["attempt"], row["step"]) for row in dropped] == [(1, 2)]
    logged = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    assert run.arrow("loss")["total_loss"].to_pylist() == pytest.approx(logged, rel=1e-6)
    assert not ours(model)


def test_a_second_training_that_cannot_be_watched_runs_on_without(tmp_path: Path) -> None:
    model = build("olmoe")
    runner = hf.Trainer(
        model=model, args=arguments(tmp_path, max_steps=1), train_dataset=Lines(),
        callbacks=[loopscope_callback(out=tmp_path / "run")],
    )  # fmt: skip
    runner.train()
    (tmp_path / "run" / "run.json").write_text("{")
    runner.train()
    assert runner.state.global_step == 1


class OwnLoss(hf.Trainer):  # type: ignore[misc]
    """Adds the balancing term itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        output = model(**inputs, output_router_logits=True, **kwargs)
        loss = output.loss + 0.5 * output.aux_loss
        return (loss, output) if return_outputs else loss


@pytest.mark.parametrize("kind", ["compute_loss", "label smoothing", "compute_loss_func"])
def test_another_objective_than_the_models(kind: str, tmp_path: Path) -> None:
    model = build("olmoe")
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.0
    chosen: dict[str, Any] = {}
    if kind == "compute_loss_func":
        chosen["compute_loss_func"] = lambda output, labels, num_items_in_batch=None: (
            output.logits.square().mean()
        )
    options = arguments(
        tmp_path, max_steps=2, label_smoothing_factor=0.1 if kind == "label smoothing" else 0.0
    )
    runner = (OwnLoss if kind == "compute_loss" else hf.Trainer)(
        model=model, args=options, train_dataset=Lines(), **chosen,
        callbacks=[loopscope_callback(out=tmp_path / "run", on_error="raise")],
    )  # fmt: skip
    runner.train()
    run = loopscope.open_run(tmp_path / "run")
    losses = run.arrow("loss").to_pylist()
    logged = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    assert [row["total_loss"] for row in losses] == pytest.approx(logged, rel=1e-6)
    for row in losses:
        assert row["closure_error"] is row["lb_loss_factor"] is None
        assert (row["task_loss"] is None) == (kind != "compute_loss")
        assert (row["lb_loss"] is None) == (kind != "compute_loss")
    assert {row["severity"] for row in run.arrow("health").to_pylist()} == {"info"}
