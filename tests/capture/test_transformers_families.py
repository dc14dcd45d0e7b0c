"""Families that nobody reviewed, by `attach(model)` alone, against what their experts were handed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

BENCHES = Path(__file__).parents[2] / "scripts" / "benches"
sys.path.append(str(BENCHES))

from lib.family_check import MODES, check, check_model  # noqa: E402
from lib.family_models import build, families  # noqa: E402

# Ways to route: bias as an argument, in a child, on logits; softmax of the chosen, scaled; groups; a loop; indices that
# only the experts get; scores that are 0 where an expert does not run.
SAMPLE = (
    "afmoe",
    "ernie4_5_moe",
    "kolibri1",
    "openai_privacy_filter",
    "mistral4",
    "inkling2_loop",
    "dbrx",
    "llama4",
)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_of_families(family: str) -> None:
    assert check(family, "fp32") == "right"


def test_a_module_around_a_model_and_another_head() -> None:
    import transformers

    class Around(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    config = build("mixtral").config
    assert check_model(Around(build("mixtral"))) == "right"
    assert check_model(transformers.MixtralForSequenceClassification(config)) == "right"


@pytest.mark.long
@pytest.mark.parametrize("family", families())
def test_no_family_is_silently_wrong(family: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHES / "lib" / "family_check.py"), family],
        capture_output=True, text=True, timeout=280, check=False, env={"PYTHONPATH": str(BENCHES), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = json.loads(done.stdout.splitlines()[-1])
    assert not [mode for mode in MODES if verdicts[mode].startswith("wrong")], verdicts
