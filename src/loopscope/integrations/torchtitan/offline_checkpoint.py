"""A finished torchtitan checkpoint of the reference model: where it belongs, whether it is whole, and its model."""

import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from loopscope.errors import ConfigError, ProbeError
from loopscope.models.loopmoe.flavors import LoopMoEShape, build_config
from loopscope.probe.legacy import load_legacy
from loopscope.store import read_manifest

_METADATA = ".metadata"
_STEP = re.compile(r"^step-(\d+)$")
_NOT_MODEL = ("train_state.", "dataloader.", "lr_scheduler.", "optimizer.", "state.", "param_groups.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What the run that wrote a checkpoint says of its model and its probes."""

    run: Path
    """Folder of the run."""
    run_id: str
    shape: LoopMoEShape
    tokenizer_path: Path
    seq_len: int
    """Tokens per probe document at most, as its own probes had it."""
    batch_size: int
    """Documents per probe forward."""
    param_dtype: torch.dtype
    """What parameters were cast to in its forwards."""
    corpora: Mapping[str, str]
    """Corpus name → token hash of its own probes."""

    @property
    def vocab_size(self) -> int:
        """Entries of embedding and head."""
        return self.shape.vocab_size

    @property
    def context(self) -> int:
        """The longest sequence that the model takes."""
        return self.shape.max_seq_len

    def check(self, checkpoint: Path) -> None:
        """Refuse a checkpoint that was not written to its end, by its name.

        Raises:
            ConfigError: there is no such folder.
            ProbeError: its metadata or a piece of its data is missing or cut off.
        """
        if not checkpoint.is_dir():
            raise ConfigError(f"there is no checkpoint {checkpoint}, expected a step-N folder")
        incomplete = f"checkpoint {checkpoint.name} in {checkpoint.parent} is incomplete"
        if not (checkpoint / _METADATA).is_file():
            raise ProbeError(
                f"{incomplete}: {_METADATA}, which is written last, is missing. Its writing was cut off; use another "
                "one."
            )
        try:
            pieces = FileSystemReader(checkpoint).read_metadata().storage_data.values()
        except Exception as error:  # noqa: BLE001 - a cut pickle raises whatever its last bytes make of it
            raise ProbeError(
                f"{incomplete}: {_METADATA} cannot be read "
                f"({type(error).__name__}: {error}). Its writing was cut off; use another one."
            ) from None
        needed: dict[str, int] = defaultdict(int)
        for piece in pieces:
            needed[piece.relative_path] = max(piece.offset + piece.length, needed[piece.relative_path])
        for name, size in sorted(needed.items()):
            path = checkpoint / name
            if (have := path.stat().st_size if path.is_file() else 0) < size:
                raise ProbeError(
                    f"{incomplete}: {name} has {have} bytes, expected {size}. Its writing was cut off; use another one."
                )

    def load(self, checkpoint: Path, dtype: torch.dtype | None) -> nn.Module:
        """The model with the checkpoint's parameters, on the accelerator where there is one.

        Args:
            checkpoint: a complete one.
            dtype: of the parameters; None takes what the training's forwards had.

        Raises:
            ProbeError: the checkpoint is of another architecture.
        """
        model: nn.Module = build_config(self.shape).build()
        model.init_weights(buffer_device=None)  # type: ignore[operator]  # nn.Module types every attribute as a tensor
        state = model.state_dict()
        _check_architecture(checkpoint, state)
        with warnings.catch_warnings():
            # It says that it loads in a single process, which is what is wanted.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, checkpoint_id=checkpoint, no_dist=True)
        model.load_state_dict(state)
        for parameter in model.parameters():
            # Buffers keep their type, as they do under mixed precision in training.
            parameter.data = parameter.data.to(dtype or self.param_dtype)
        return model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Legacy:
    """Checkpoints from before head and tail existed, loaded by their own code; see `load_legacy`."""

    code: str
    """MODULE:FUNCTION or FILE.py:FUNCTION."""
    num_layers_in_stack: int
    """L."""
    tokenizer_path: Path
    seq_len: int
    """Tokens per probe document at most."""
    batch_size: int = 8
    """Documents per probe forward."""
    vocab_size: int | None = None
    """Unknown; the forward's own logits tell."""
    context: int | None = None
    """Unknown."""
    run_id: str = "legacy"
    """Such checkpoints know no run."""
    corpora: Mapping[str, str] = field(default_factory=dict)
    """None are known."""

    @property
    def run(self) -> Path:
        """Stands in for the run's folder: the code's."""
        return Path(self.code.rpartition(":")[0])

    def check(self, checkpoint: Path) -> None:
        """Refuse what is not there; only its own code knows what a whole one holds."""
        _named(self.tokenizer_path)
        if not checkpoint.exists():
            raise ConfigError(f"there is no checkpoint {checkpoint}, expected one named step-N")

    def load(self, checkpoint: Path, dtype: torch.dtype | None) -> nn.Module:
        """The model of a checkpoint, its floating-point parameters in `dtype` unless that is None."""
        model = load_legacy(self.code, checkpoint, self.num_layers_in_stack)
        return model if dtype is None else model.to(dtype)


CheckpointSource = Training | Legacy
"""Where a checkpoint's model comes from."""


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder name says.

    Raises:
        ConfigError: it is not named step-N.
    """
    if not (found := _STEP.match(checkpoint.name)):
        raise ConfigError(f"{checkpoint} is not a checkpoint folder; expected one named step-N")
    return int(found[1])


def find_checkpoints(folder: Path) -> list[Path]:
    """The step-N folders of a run, of its checkpoint folder, or of any folder that holds them; by step.

    Raises:
        ConfigError: there is none.
    """
    for place in (folder, folder / "torchtitan" / "checkpoint", folder / "checkpoint"):
        if found := [path for path in place.glob("step-*/") if _STEP.match(path.name)]:
            return sorted(found, key=step_of)
    raise ConfigError(
        f"{folder} holds no checkpoint; expected step-N folders in it, or in its torchtitan/checkpoint"
    )


def training_of(checkpoint: Path, run: Path | None = None, tokenizer: Path | None = None) -> Training:
    """The run that wrote a checkpoint: `run`, or the first folder above it that is one.

    Args:
        checkpoint: a step-N folder.
        run: the run's folder; None looks for it.
        tokenizer: folder of its tokenizer; None takes the one that the run says.

    Raises:
        ConfigError: none is found, or it says nothing of a model that can be built.
        StoreError: its run.json is damaged.
    """
    places = [run] if run else checkpoint.resolve().parents
    if (folder := next((path for path in places if (path / "run.json").is_file()), None)) is None:
        raise ConfigError(
            f"no run.json above {checkpoint}; expected the run that wrote it. Name its folder with --run."
        )
    manifest = read_manifest(folder)
    trainer = manifest.configuration.get("trainer", {})
    try:
        spec, options = trainer["model_spec"], trainer["loopscope"]
        if spec["name"] != "loopmoe":
            raise ProbeError(
                f"the run {folder} trained {spec['name']!r}, expected 'loopmoe', the model whose checkpoints are "
                "known. Probe others from Python with run_probe_forward."
            )
        return Training(
            run=folder,
            run_id=manifest.run_id,
            shape=shape_of(spec["model"]),
            tokenizer_path=_named(tokenizer)
            if tokenizer
            else _tokenizer(folder, Path(trainer["hf_assets_path"])),
            seq_len=min(options["probe_seq_len"], trainer["training"]["seq_len"]),
            batch_size=options["probe_batch_size"],
            param_dtype=getattr(torch, trainer["training"]["mixed_precision_param"]),
            corpora=manifest.corpora,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'run.json'} does not describe a torchtitan training ({type(error).__name__}: {error}); "
            "expected the run of `loopscope train` that wrote the checkpoint"
        ) from None


def shape_of(model: Mapping[str, Any]) -> LoopMoEShape:
    """The shape behind a stored model configuration."""
    edge, loop = model["layers"][0], model["layers"][1]
    return LoopMoEShape(
        dim=model["dim"],
        num_heads=edge["attention"]["n_heads"],
        expert_hidden_dim=edge["moe"]["routed_experts"]["inner_experts"]["hidden_dim"],
        num_loop_steps=model["num_loop_steps"],
        num_layers_in_stack=len(model["layers"]) - 2,
        loop_num_experts=loop["moe"]["router"]["num_experts"],
        loop_top_k=loop["moe"]["router"]["top_k"],
        edge_num_experts=edge["moe"]["router"]["num_experts"],
        edge_top_k=edge["moe"]["router"]["top_k"],
        vocab_size=model["vocab_size"],
        max_seq_len=edge["attention"]["rope"]["max_seq_len"],
        dropout=edge["dropout"],
    )


def _check_architecture(checkpoint: Path, state: Mapping[str, torch.Tensor]) -> None:
    stored = {
        name: tuple(entry.size)
        for name, entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_MODEL)
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [
        *(
            f"{name}: {stored.get(name, 'missing')}, expected {shape}"
            for name, shape in wanted.items()
            if stored.get(name) != shape
        ),
        *(f"{name}: unknown" for name in sorted(stored.keys() - wanted.keys())),
    ]
    if wrong:
        raise ProbeError(
            f"checkpoint {checkpoint} is of another architecture than its run says ({len(wrong)} differences, first: "
            f"{'; '.join(wrong[:3])}). Name the run that wrote it with --run."
        )


def _named(tokenizer: Path) -> Path:
    if not tokenizer.is_dir():
        raise ConfigError(f"there is no tokenizer {tokenizer}, expected the folder of one")
    return tokenizer


def _tokenizer(run: Path, said: Path) -> Path:
    if said.is_dir():
        return said
    # A run that was moved or copied still holds its tokenizer.
    if len(found := list((run / "torchtitan" / "text").glob("*/tokenizer"))) == 1:
        return found[0]
    raise ConfigError(
        f"the run's tokenizer {said} is not there, expected its folder. Restore it, or name it with --tokenizer."
    )
