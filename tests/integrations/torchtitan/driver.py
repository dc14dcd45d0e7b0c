"""Runs several short trainings in one process per rank, since starting torch costs more than training.

``torchrun ... driver.py SCENARIOS.json``; each scenario names its run folder and what differs from the base. Per
rank and scenario a JSON file tells what the training ended with: hashes of everything that could have changed.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from loopscope.models import cpu_compat

cpu_compat.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402

from loopscope.integrations.torchtitan import configs  # noqa: E402
from loopscope.integrations.torchtitan.text import DATASET_NAME, register_dataset  # noqa: E402
from loopscope.integrations.torchtitan.trainer import LoopscopeTrainer  # noqa: E402
from loopscope.models.loopmoe import model_registry  # noqa: E402

PLAIN_FIELDS = ("block", "unrolled_pos", "loop_step", "layer_idx", "num_experts", "top_k")
RECOMPUTE = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


def build_config(scenario: dict[str, Any]) -> Any:
    """A LoopscopeTrainer.Config for one scenario."""
    config = configs.debug()
    config.model_spec = model_registry("debug", **scenario.get("model", {}))
    config.hf_assets_path = scenario["tokenizer"]
    register_dataset(DATASET_NAME, scenario["dataset"])
    config.dataloader.dataset_path = scenario["dataset"]
    config.training.steps = scenario["steps"]
    config.training.local_batch_size = scenario.get("local_batch_size", 2)
    config.training.global_batch_size = scenario.get("global_batch_size", -1)
    config.training.seq_len = scenario.get("seq_len", 32)
    config.training.mixed_precision_param = scenario.get("dtype", "float32")
    config.activation_checkpoint = RECOMPUTE[scenario.get("recompute", "none")]
    config.parallelism.spmd_backend = scenario.get("backend", "spmd_types")
    config.compile.enable = "compile" in scenario
    config.compile.backend = scenario.get("compile", "inductor")
    config.compile.components = ["model"]
    config.checkpoint.enable = "checkpoint_every" in scenario
    config.checkpoint.interval = scenario.get("checkpoint_every", 1)
    config.debug.deterministic = True
    config.debug.seed = 7
    for name, value in scenario.get("metrics", {}).items():
        setattr(config.metrics, name, value)
    for name, value in scenario.get("loopscope", {}).items():
        setattr(config.loopscope, name, value)
    config.loopscope.out = scenario["out"]
    config.loopscope.probe_seq_len = 24
    return config


def digest(value: Any) -> str:
    """SHA-256 of tensors and plain data, nested; tensors by their local bytes."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            local = getattr(item, "_local_tensor", item).detach().cpu().contiguous().reshape(-1)
            found.update(f"{local.dtype}{tuple(item.shape)}".encode())
            found.update(local.view(torch.uint8).numpy().tobytes() if local.numel() else b"")
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                found.update(str(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        else:
            found.update(pickle.dumps(item))

    add(value)
    return found.hexdigest()


def keep_windows(trainer: Any, windows: list[dict[str, Any]]) -> None:
    """Copy every traced window whole, for a reduction in one process afterwards."""
    reduce = trainer._reduce

    def noting(window: Any) -> None:
        copies = {
            pos: {
                **{name: getattr(point, name) for name in PLAIN_FIELDS},
                **{name: tensor.clone() for name, tensor in point.tensors().items()},
            }
            for pos, point in window.items()
        }
        windows.append({"step": trainer.step, "points": copies})
        reduce(window)

    trainer._reduce = noting


def keep_choices(trainer: Any, choices: dict[int, list[Any]]) -> None:
    """Note every token's selection gap and its experts, beside what the collector does with them."""
    reduce = trainer._reduce

    def noting(window: Any) -> None:
        for pos, point in window.items():
            ranked = point.router_logits.flatten(0, 1).sort(-1, descending=True).values
            gaps = ranked[:, point.top_k - 1] - ranked[:, point.top_k]
            experts = point.topk_idx.flatten(0, 1).sort(-1).values
            choices.setdefault(pos, []).extend(zip(gaps.tolist(), experts.tolist(), strict=True))
        reduce(window)

    trainer._reduce = noting


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Train one scenario; returns what it ended with."""
    import random

    import numpy as np

    random.seed(1)
    np.random.seed(1)
    if (before := scenario.get("before")) is not None:
        importlib.import_module(before).before(scenario)
    trainer = build_config(scenario).build()
    objectives: list[str] = []
    body = trainer.fwd_bwd_fn

    def noting(*args: Any, **kwargs: Any) -> Any:
        loss = body(*args, **kwargs)
        objectives.append(loss.item().hex())
        return loss

    trainer.fwd_bwd_fn = noting
    if (probe_steps := scenario.get("probe_steps")) is not None:
        trainer.session.is_probe_step = lambda step, last_step=None: step in probe_steps
    if (hook := scenario.get("hook")) is not None:
        importlib.import_module(hook).install(trainer, scenario)
    choices: dict[int, list[Any]] = {}
    windows: list[dict[str, Any]] = []
    if scenario.get("keep_windows"):
        keep_windows(trainer, windows)
    if scenario.get("keep_trace"):
        keep_choices(trainer, choices)
    if (kill_after := scenario.get("kill_after")) is not None:
        trainer.should_continue_training = lambda: trainer.step < kill_after or os.kill(os.getpid(), 9)
    try:
        trainer.train()
        if windows:
            torch.save(windows, f"{scenario['result']}.{dist.get_rank()}.pt")
        ended = {
            "objectives": objectives,
            "parameters": digest(dict(trainer.model.named_parameters())),
            "buffers": digest(dict(trainer.model.named_buffers())),
            "optimizer": digest(trainer.optimizers.state_dict()),
            "dataloader": digest(trainer.dataloader.state_dict()),
            "rng": digest([torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())]),
            "choices": choices,
            "graphs": sum(torch._dynamo.utils.counters["stats"].values()),
            "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        }
        if scenario.get("draw_batches"):  # last, since it moves the dataloader and random streams
            ended["dataloader_parts"] = dataloader_parts(trainer)
            ended["buffers_ahead"] = buffers_ahead(trainer)
            ended["next_batches"] = next_batches(trainer)
        return ended
    finally:
        trainer.close()


def next_batches(trainer: Any, count: int = 3) -> str:
    """Digest of the batches that training would have gone on with: where the dataloader really is."""
    loader = trainer.dataloader
    loader.load_state_dict(loader.state_dict())
    return digest([[inputs, labels] for inputs, labels in itertools.islice(iter(loader), count)])


def dataloader_parts(trainer: Any) -> dict[str, str]:
    """Digest of every leaf of the dataloader's state, by its path."""
    found: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{path}.{key}", value[key])
        else:
            found[path] = digest(value)

    for name, value in trainer.dataloader.state_dict().items():
        add(name, pickle.loads(value) if isinstance(value, bytes) else value)
    return found


def buffers_ahead(trainer: Any) -> dict[str, Any]:
    """Tokens that the dataloader has read and not yet handed out, and documents read so far."""
    (state,) = (value for value in trainer.dataloader.state_dict().values() if isinstance(value, bytes))
    dataset = pickle.loads(state)["dataset_state"]
    return {name: dataset[name] for name in ("inputs_buffer", "labels_buffer", "sample_idx")}


def share_meshes() -> None:
    """One ParallelDims per backend: a process knows its meshes by identity, so a second set does not fit the first."""
    known: dict[str, Any] = {}
    fresh = LoopscopeTrainer.init_distributed

    def init_distributed(trainer: LoopscopeTrainer) -> Any:
        backend = trainer.config.parallelism.spmd_backend
        if backend not in known:
            known[backend] = fresh(trainer)
        return known[backend]

    LoopscopeTrainer.init_distributed = init_distributed  # type: ignore[method-assign]


def main() -> int:
    """Run every scenario in turn; a failure is written down and does not stop the others."""
    # torchtitan waits two seconds for other ranks at the end of every training; here they all go on together.
    import torchtitan.trainer

    torchtitan.trainer.time.sleep = lambda seconds: None  # type: ignore[attr-defined]
    share_meshes()
    failed = 0
    for scenario in json.loads(Path(sys.argv[1]).read_text()):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        try:
            result = run(scenario)
        except Exception as error:
            result = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
            failed += "error" not in scenario
        rank = dist.get_rank() if dist.is_initialized() else 0
        place = Path(scenario["result"] + f".{rank}")
        place.with_name(f"{place.name}.part").write_text(json.dumps(result))
        place.with_name(f"{place.name}.part").rename(place)  # whoever waits for it sees it whole
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
