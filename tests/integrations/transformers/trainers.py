"""Small trainings with `transformers.Trainer` for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopscope.capture.hooks import RootHook

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Lines(torch.utils.data.Dataset[Any]):
    """Sequences of different length (6 + index % 6), padded on the right."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(12, dtype=torch.int64)
        length = 6 + index % 6
        ids[:length] = torch.arange(length) + 3 + index
        mask = (torch.arange(12) < length).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same as a stream, which has no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter([Lines()[index] for index in range(self.count)])


def arguments(out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    return hf.TrainingArguments(output_dir=str(out / "hf"), **{**given, **options})


class Groups(hf.TrainerCallback):  # type: ignore[misc]
    """What really went into each optimizer step: forwards, and tokens of their masks."""

    def __init__(self, model: Any) -> None:
        self.steps: list[tuple[int, int]] = []
        self._masks: list[int] = []
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._masks.append(int(kwargs["attention_mask"].sum()))

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append((len(self._masks), sum(self._masks)))
        self._masks.clear()


def groups_of(run: Any) -> list[tuple[int, int]]:
    """Microbatches and tokens of each traced step in order."""
    rows = run.arrow("router").to_pylist()
    found = {row["step"]: (row["num_microbatches"], row["num_tokens"]) for row in rows}
    return [found[step] for step in sorted(found)]


def ours(model: Any) -> list[Any]:
    """Hooks of loopscope; transformers leaves one of its own where it recomputes."""
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [
        hook for hook in hooks if isinstance(hook, RootHook) or "loopscope" in getattr(hook, "__module__", "")
    ]
