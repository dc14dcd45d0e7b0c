"""`loopscope train`: prepares the text, starts the ranks, and waits for them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from loopscope.cli.console import working
from loopscope.cli.flags import check_least
from loopscope.cli.torchrun import run_ranks
from loopscope.errors import ConfigError, NotARunError, RunExistsError

if TYPE_CHECKING:
    from loopscope.integrations.torchtitan.text import PreparedText

CONFIGS_MODULE = "loopscope.integrations.torchtitan.configs"
CONFIGS = ("debug", "wide")
"""The ready configurations: the functions of `CONFIGS_MODULE`."""

_RUN_FILE = "run.json"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train a looped Mixture-of-Experts model with torchtitan, recording what happens inside it.

    Text comes from --text, or from the Python standard library's sources. Everything is written below --out.
    """

    out: Path
    """Folder of the run; it must not hold another run."""
    config: str = "debug"
    """Configuration: debug (trains on two CPU cores) or wide; or a function of --module."""
    module: str = CONFIGS_MODULE
    """Importable module with the configuration functions."""
    ranks: int = 1
    """Processes on this machine; more than one shard the model with FSDP2."""
    steps: int = 120
    """Optimizer steps in total, those before a resume included."""
    trace_every: int = 10
    """Trace every N steps; also steps 1-10, powers of two up to 512, and the last. 0 turns tracing off."""
    probe_every: int = 500
    """Run the probe corpus every M steps; also step 0 and the last. 0 turns probing off."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue the run in --out from its latest checkpoint, as a new attempt."""
    text: Path | None = None
    """UTF-8 text file, or folder of such files, to train on; default: the Python standard library's sources."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type that parameters and inputs are cast to in the forward."""
    recompute: Literal["none", "full"] = "none"
    """Activation checkpointing: none, or full recompute of every block in the backward."""
    seed: int = 0
    """Seed of the parameters and of everything random."""
    per_rank: tyro.conf.FlagCreatePairsOff[bool] = False
    """With several ranks: also write rank-local rows of every rank beside the global ones."""
    on_error: Literal["record", "raise"] = "record"
    """record: errors of loopscope are counted and training goes on; raise: they stop it."""
    torchtitan: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[-- FLAGS ...]")] = ()
    """After `--`: any flags of torchtitan's own, such as --training.local-batch-size 8."""

    def run(self) -> int:
        """Train; 0 when it ended as asked, 1 when it failed, 2 when a setting is wrong.

        Raises:
            ConfigError: a flag is wrong; the message names it.
            RunExistsError, NotARunError: `out` holds a run without --resume, or none with it.
        """
        self._check()
        text = self._prepare_text()
        return run_ranks(
            rank_arguments(self, text),
            ranks=self.ranks,
            steps=self.steps,
            # Each rank's threads would otherwise be as many as the machine's cores.
            environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.ranks)), **os.environ},
            out=self.out,
        )

    def _check(self) -> None:
        check_least(self, ranks=1, steps=1, trace_every=0, probe_every=0, seed=0)
        if self.module == CONFIGS_MODULE and self.config not in CONFIGS:
            raise ConfigError(
                f"--config is {self.config!r}, expected one of {', '.join(CONFIGS)}. For a configuration of "
                "your own, name the module that holds its function with --module."
            )
        check_out(self.out, resume=self.resume)

    def _prepare_text(self) -> PreparedText | None:
        if self.module != CONFIGS_MODULE and self.text is None:
            return None  # that configuration names its own data
        from loopscope.integrations.torchtitan.text import VOCAB_SIZE, prepare_text

        with working("preparing the text"):
            text = prepare_text(self.text, self.out / "torchtitan" / "text", VOCAB_SIZE)
        if text.num_documents < self.ranks:
            raise ConfigError(
                f"the text has {text.num_documents} documents for --ranks {self.ranks}, expected at least "
                "one for each rank. Give a longer text, or fewer ranks."
            )
        return text


def check_out(out: Path, *, resume: bool) -> None:
    """Refuse an output folder before anything is started or written.

    Raises:
        RunExistsError: it holds a run, and this is no resume.
        NotARunError: this is a resume, and it holds none.
        ConfigError: it is a file, or cannot be written.
    """
    run_file = out / _RUN_FILE
    if resume and not run_file.is_file():
        raise NotARunError(
            f"--resume: {out} holds no run ({_RUN_FILE} is missing), expected one to continue. Name its "
            "folder with --out, or leave out --resume to start a run there."
        )
    if not resume and run_file.is_file():
        raise RunExistsError(
            f"--out {out} already holds a run, expected a new or empty folder. Continue it with --resume, or "
            "name another folder."
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file, expected a folder. Name another path.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be made ({error.strerror or error}), expected a place that can be written. "
            "Name another path."
        ) from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--out {out} cannot be written (permission denied), expected a writable folder. Name another "
            "path."
        )


def rank_arguments(train: Train, text: PreparedText | None) -> list[str]:
    """What each rank gets as arguments after the launcher's module, torchtitan's own flags last."""
    flags = {
        "--module": train.module,
        "--config": train.config,
        "--loopscope.out": str(train.out.resolve()),
        "--loopscope.trace-every": str(train.trace_every),
        "--loopscope.probe-every": str(train.probe_every),
        "--loopscope.on-error": train.on_error,
        "--training.steps": str(train.steps),
        "--training.mixed-precision-param": _DTYPES[train.dtype],
        "--debug.seed": str(train.seed),
    }
    if text is not None:
        flags["--hf-assets-path"] = str(text.tokenizer_path.resolve())
        flags["--dataloader.dataset-path"] = str(text.dataset_path.resolve())
    switches = {
        "--metrics.disable-color-printing": not sys.stdout.isatty(),
        "--loopscope.per-rank": train.per_rank,
        "--loopscope.resume": train.resume,
    }
    return [
        *(part for pair in flags.items() for part in pair),
        *(switch for switch, on in switches.items() if on),
        *train.torchtitan,
        # torchtitan makes a subcommand of the recompute policy: it must follow every flag.
        *([] if train.recompute == "none" else [f"activation-checkpoint:{train.recompute}"]),
    ]
