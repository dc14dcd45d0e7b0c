from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from loopscope.capture import registry
from loopscope.capture.registry import TASKS, adapters, resolve_adapter, resolve_targets


def test_every_task_of_every_backend_is_a_class_or_says_what_is_supported() -> None:
    for backend in ("torch", "transformers"):
        for task in TASKS:
            assert isinstance(resolve_adapter(task, backend), type)
    with pytest.raises(
        ValueError,
        match=r"'mlx' has no adapter for task 'probe'; it supports pretrain, sft\. "
        r"Every task is supported by torchtitan, torch, transformers",
    ):
        resolve_adapter("probe", "mlx")
    with pytest.raises(ValueError, match="Did you mean 'transformers'"):
        resolve_adapter("sft", "transformer")


def test_it_is_a_read_only_mapping_per_backend() -> None:
    assert {"torchtitan", "torch", "transformers", "mlx"} <= set(adapters())
    found = resolve_targets("torch")
    assert "sft" in found
    assert list(found.keys()) == list(TASKS)
    with pytest.raises(TypeError):
        found["sft"] = object  # type: ignore[index]
    with pytest.raises(TypeError):
        adapters()["new"] = found  # type: ignore[index]


def test_third_parties_add_backends_and_cannot_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("jax.pretrain", "collections:OrderedDict", registry.ENTRY_POINTS),
        EntryPoint("torch.sft", "collections:OrderedDict", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: points if group == "loopscope.adapters" else []
    )
    adapters.cache_clear()
    try:
        from collections import OrderedDict

        assert resolve_adapter("pretrain", "jax") is OrderedDict
        assert resolve_adapter("sft", "torch") is not OrderedDict
        with pytest.raises(ValueError, match="'jax' has no adapter for task 'probe'; it supports pretrain"):
            resolve_adapter("probe", "jax")
    finally:
        monkeypatch.undo()
        adapters.cache_clear()
