"""Flags that several verbs have, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from loopscope.errors import ConfigError

if TYPE_CHECKING:
    from loopscope.alerts import AlertOverrides
    from loopscope.capture.adapter import Adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFlag:
    """One run."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleFlags:
    """How a run is judged otherwise than it was trained."""

    warmup_steps: int | None = None
    """Steps at the start that routing and loop are not judged by; default: as the run was trained."""
    sustain: int | None = None
    """Traces in a row that must break a rule's bound before it is an alert; default: as the run was trained."""

    def bounds(self) -> AlertOverrides:
        """The flags as bounds of the rules.

        Raises:
            ConfigError: a flag is wrong.
        """
        from loopscope.alerts import AlertOverrides

        return AlertOverrides(warmup_steps=self.warmup_steps, sustain=self.sustain)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """A model that is looked at and not run."""

    model: str
    """`package.module:function` that returns the model, or a transformers config.json. Nothing is run."""
    backend: Literal["torchtitan", "torch", "transformers", "mlx"] = "torch"
    """What runs the model."""
    task: Literal["pretrain", "sft", "probe"] = "pretrain"
    """What is being done."""
    config: Path | None = None
    """YAML file with overrides of the derived capture plan."""

    def adapter(self) -> Adapter:
        """The model's adapter, with its plan."""
        from loopscope.capture.files import load_overrides
        from loopscope.capture.model_source import build_model
        from loopscope.capture.registry import resolve_adapter

        found: Adapter = resolve_adapter(self.task, self.backend)(
            build_model(self.model, self.backend),
            overrides=None if self.config is None else load_overrides(self.config),
        )
        return found


def check_least(flags: object, **least: int) -> None:
    """Refuse numbers that are too small; None is none.

    Raises:
        ConfigError: the value of a flag is below the one given here.
    """
    for name, bound in least.items():
        value = getattr(flags, name)
        if value is not None and value < bound:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {value}, expected an integer >= {bound}. Change {flag}.")
