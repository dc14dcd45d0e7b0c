"""TRL's trainers and PEFT's adapters, for real: rows against what the experts were handed, padding left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build
from torch import Tensor

import loopscope
from loopscope.integrations.transformers import loopscope_callback

pytestmark = pytest.mark.long
WORDS = 40


class Handed:
    """Tokens of each expert of each layer, over all forwards that a backward follows, padding left out."""

    def __init__(self, model: Any) -> None:
        self.counts: dict[int, Tensor] = {}
        self.tokens = self.forwards = 0
        self._mask: Tensor | None = None
        model.register_forward_pre_hook(self._began, with_kwargs=True)
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Experts"):
                (layer,) = (int(part) for part in name.split(".") if part.isdigit())
                module.register_forward_pre_hook(self._hook(layer))

    def _began(self, model: Any, args: Any, kwargs: Any) -> None:
        trains = model.training and torch.is_grad_enabled()
        mask = kwargs.get("attention_mask", torch.ones_like(kwargs["input_ids"]))  # packed ones have none
        self._mask = mask.flatten().bool() if trains else None
        if self._mask is not None:
            self.forwards += 1
            self.tokens += int(self._mask.sum())

    def _hook(self, layer: int) -> Callable[..., None]:
        def note(module: Any, args: Any) -> None:
            if self._mask is not None and torch._C._current_graph_task_id() == -1:
                chosen = args[1].reshape(-1, args[1].shape[-1])[self._mask].flatten()
                counts = torch.bincount(chosen, minlength=module.num_experts)
                self.counts[layer] = self.counts.get(layer, 0) + counts

        return note


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(
        f"w{number}" for number in torch.randint(3, WORDS, (count,), generator=generator).tolist()
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, WORDS)}
    found = Tokenizer(models.WordLevel(known, unk_token="w3"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def texts() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(
        [{"text": words(6 + n % 6, n)} for n in range(20)]
    )


def preferences() -> Any:
    rows = [
        {
            "prompt": words(4, n),
            "chosen": f" {words(4 + n % 3, n + 100)}",
            "rejected": f" {words(3, n + 200)}",
        }
        for n in range(20)
    ]
    return pytest.importorskip("datasets").Dataset.from_list(rows)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ["sft", "packed", "dpo"])
def test_rows_are_those_of_the_forwards_that_are_trained(tmp_path: Path, kind: str, adapted: bool) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, reference = build("qwen3_moe"), build("qwen3_moe")
    handed = Handed(model)
    options = {
        "output_dir": str(tmp_path / "trl"), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 3, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "max_length": 24, "bf16": False,
    }  # fmt: skip
    callback = loopscope_callback(tmp_path / "run", every=1, on_error="raise")
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer(), "callbacks": [callback]}
    if adapted:
        given["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    if kind == "dpo":
        second = {} if adapted else {"ref_model": reference}  # an adapter's reference is the model without it
        trainer = trl.DPOTrainer(
            args=trl.DPOConfig(**options), train_dataset=preferences(), **given, **second
        )
    else:
        arguments = trl.SFTConfig(**options, packing=kind == "packed", padding_free=False)
        trainer = trl.SFTTrainer(args=arguments, train_dataset=texts(), **given)
    trainer.train()

    run = loopscope.open_run(tmp_path / "run")
    rows = run.arrow("router").to_pylist()
    microbatches = {row["step"]: row["num_microbatches"] for row in rows}
    assert (list(microbatches), sum(microbatches.values())) == ([1, 2, 3], handed.forwards)
    for layer, counts in handed.counts.items():
        own = [row for row in rows if row["layer_idx"] == layer]
        assert [
            sum(column) for column in zip(*(row["expert_count"] for row in own), strict=True)
        ] == counts.tolist()
        assert sum(row["num_tokens"] for row in own) == handed.tokens
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses = run.arrow("loss").to_pylist()
    assert [row["total_loss"] for row in losses] == pytest.approx(logged, rel=1e-6)
    assert all(row["grad_norm"] > 0 for row in losses)
    assert run.sql("SELECT * FROM health WHERE severity <> 'info'").fetchall() == []
