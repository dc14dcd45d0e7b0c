"""Families that nobody reviewed, by `attach(model)` alone, against what their experts were handed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHES = Path(__file__).parents[2] / "scripts" / "benches"
sys.path.append(str(BENCHES))

from lib.family_check import MODES, check  # noqa: E402
from lib.family_models import families  # noqa: E402

# One of each way to route: bias as an argument, in a child, on logits; softmax of the chosen, scaled; groups.
SAMPLE = ("afmoe", "ernie4_5_moe", "kolibri1", "openai_privacy_filter", "mistral4", "minimax_m2")


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_of_families(family: str) -> None:
    assert check(family, "fp32") == "right"


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
