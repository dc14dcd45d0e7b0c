"""Some of the random trainings of `scripts/bench configurations`: rows as the oracle says, trainings bit-equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "benches" / "lib"))

from random_configurations import Configuration
from random_verdicts import judged

SAMPLE = (
    Configuration(number=1, family="mixtral", options={"num_hidden_layers": 2, "output_router_logits": True,
                  "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.05}, dtype="autocast",
                  mask="right", microbatches=(2, 2), checkpoint="layers-reentrant", fails="behind"),
    Configuration(number=2, family="olmoe", options={"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3,
                  "attention_dropout": 0.1}, dtype="bf16", told="begin_step", microbatches=(1, 3), checkpoint="model"),
    Configuration(number=3, family="qwen3_moe", options={"num_hidden_layers": 2, "num_experts": 8,
                  "num_experts_per_tok": 2, "norm_topk_prob": True}, mask="left", checkpoint="layers",
                  evaluates="between steps", microbatches=(2, 2), dtype="fp16"),
    Configuration(number=4, family="deepseek_v3", options={"num_hidden_layers": 2, "n_routed_experts": 8, "n_group": 4,
                  "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1}, mask="right",
                  told="begin_step and number", microbatches=(1, 2)),
    Configuration(number=5, family="gpt_oss", options={"num_hidden_layers": 2, "num_local_experts": 4,
                  "num_experts_per_tok": 2, "output_router_logits": True}, mask="left", microbatches=(1, 1)),
    Configuration(number=6, family="jetmoe", options={"num_hidden_layers": 2, "num_local_experts": 4,
                  "num_experts_per_tok": 2}, mask="right", checkpoint="model", microbatches=(2, 2)),
    Configuration(number=7, family="looped", options={"num_experts": 4, "top_k": 2, "score": "sigmoid", "biased": True,
                  "most": 4}, mask="right", told="optimizer", microbatches=(2, 1, 3, 2), update="scaler", loss="loop",
                  ragged=True, fails="within", checkpoint="layers"),
    Configuration(number=8, family="mixtral", options={"num_hidden_layers": 2, "num_local_experts": 4,
                  "num_experts_per_tok": 2}, mask="4d-left-all", told="optimizer", microbatches=(1, 2), update="lbfgs",
                  evaluates="between microbatches"),
    Configuration(number=9, family="dots1", told="begin_step", microbatches=(1, 2, 2), mask="left", loss="loop",
                  resumes=True),
)  # fmt: skip


@pytest.mark.parametrize("configuration", SAMPLE, ids=lambda configuration: configuration.family)
def test_rows_are_right_and_the_training_is_untouched(configuration: Configuration, tmp_path: Path) -> None:
    verdict = judged(configuration, tmp_path)
    assert (verdict.refused, verdict.does_not_train, verdict.unproven, verdict.told) == ("", "", "", [])
    assert verdict.good, verdict.plain()
    assert verdict.rows
