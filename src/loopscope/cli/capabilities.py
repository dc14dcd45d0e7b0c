"""`loopscope capabilities`: which metrics a model can really give, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loopscope.capture.capabilities import CapabilitySet, synthesize
from loopscope.capture.files import load_overrides
from loopscope.capture.model_source import build_model
from loopscope.capture.registry import resolve_adapter
from loopscope.capture.requirements import requirements_by_metric
from loopscope.cli.console import make_console, make_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """List every metric as direct, transform (derived exactly) or absent, with the reason."""

    model: str
    """`package.module:function` that returns the model, or a transformers config.json. Nothing is run."""
    backend: Literal["torchtitan", "torch", "transformers", "mlx"] = "torch"
    """What runs the model."""
    task: Literal["pretrain", "sft", "probe"] = "pretrain"
    """What is being done."""
    config: Path | None = None
    """YAML file with overrides of the derived capture plan."""
    require: tuple[str, ...] = ()
    """Metrics that must be there; exit status 2 where one is absent."""

    def run(self) -> int:
        """Print facts and table; 0, or 2 where a required metric is absent."""
        overrides = None if self.config is None else load_overrides(self.config)
        adapter = resolve_adapter(self.task, self.backend)(
            build_model(self.model, self.backend), overrides=overrides
        )
        support = adapter.backend_support()
        found = synthesize(requirements_by_metric(), support)
        console = make_console()
        console.print(f"{type(adapter.model).__name__} on {self.backend}")
        facts = make_table(("fact", "value"), left=("fact", "value"))
        for name, value in support.facts().items():
            facts.add_row(name, value)
        console.print(facts)
        for note in adapter.plan.notes:
            console.print(f"note: {note}")
        for table in dict.fromkeys(owner for owner, _ in found):
            self._print(table, found)
        found.require(self.require)
        return 0

    def _print(self, name: str, found: CapabilitySet) -> None:
        columns = ("metric", "how", "reason")
        console = make_console()
        console.print(name)
        table = make_table(columns, left=columns)
        for (owner, metric), item in found.items():
            if owner == name:
                table.add_row(metric, item.status, item.reason.replace("[", "\\["))
        console.print(table)
