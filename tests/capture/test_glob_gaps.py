"""A glob that leaves layers out says so; one that covers them all, with other keys or without, says nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from loopscope.capture.glob_gaps import glob_gaps
from loopscope.capture.torch_adapter import TorchAdapter

BLOCK: dict[str, Any] = {"tensors": {"residual": "output"}, "placements": {}, "merge": "sum"}


def model() -> nn.Module:
    net = nn.Module()
    net.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
    net.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(12))
    return net


def test_ten_of_twelve_layers_are_named_with_the_fix() -> None:
    with pytest.warns(
        UserWarning, match=r"covers 10 of 12 .* leaves out layers\.10, layers\.11\. Widen the glob"
    ):
        adapter = TorchAdapter(model(), overrides={"layers.?": BLOCK})
    assert "covers 10 of 12" in adapter.plan.notes[0]


@pytest.mark.parametrize(
    "plan",
    [
        {"layers.*": BLOCK},
        {"layers.?": BLOCK, "layers.1?": BLOCK},
        {"layers.?": BLOCK, "layers.10": BLOCK, "layers.11": BLOCK},
        {"layers.3": BLOCK},
    ],
)
def test_what_is_whole_or_named_says_nothing(plan: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TorchAdapter(model(), overrides=plan).plan.notes == ()


def test_parts_within_layers_are_compared_with_their_like() -> None:
    modules = {
        "layers.0.moe": nn.Linear(2, 2),
        "layers.1.moe": nn.Linear(2, 2),
        "layers.2.moe": nn.LayerNorm(2),
        "head.0.moe": nn.Linear(2, 2),
        "moe": nn.Linear(2, 2),
    }
    assert not glob_gaps(["layers.*.moe"], ["layers.0.moe", "layers.1.moe"], modules)
    assert "layers.1.moe" in glob_gaps(["*.moe"], ["layers.0.moe", "head.0.moe", "moe"], modules)[0]
