"""`loopscope plan`: the resolved capture plan, as a table and as YAML that can be edited and fed back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loopscope.capture.files import dump_plan, load_overrides
from loopscope.capture.model_source import build_model
from loopscope.capture.registry import resolve_adapter
from loopscope.capture.spec import CapturePlan
from loopscope.cli.console import make_console, make_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Print what would be captured where. Nothing is run."""

    model: str
    """`package.module:function` that returns the model, or a transformers config.json."""
    backend: Literal["torchtitan", "torch", "transformers", "mlx"] = "torch"
    """What runs the model."""
    task: Literal["pretrain", "sft", "probe"] = "pretrain"
    """What is being done."""
    config: Path | None = None
    """YAML file with overrides of the derived plan."""
    yaml: bool = False
    """Print YAML alone, to be redirected into a file."""

    def run(self) -> int:
        """Print the plan; 0."""
        overrides = None if self.config is None else load_overrides(self.config)
        adapter = resolve_adapter(self.task, self.backend)(
            build_model(self.model, self.backend), overrides=overrides
        )
        if not self.yaml:
            _print_table(adapter.plan)
        print(dump_plan(adapter.plan), end="")
        return 0


def _print_table(plan: CapturePlan) -> None:
    console = make_console()
    columns = ("module", "layer", "calls", "captured", "routing", "merge")
    table = make_table(columns, left=("module", "captured", "routing", "merge"))
    for name, spec in plan.items():
        routing = spec.routing
        table.add_row(
            name,
            "" if spec.layer is None else str(spec.layer),
            "?" if spec.calls is None else str(spec.calls),
            "\n".join(f"{tensor}: {source}" for tensor, source in spec.tensors.items()).replace("[", "\\["),
            "" if routing is None else f"E {routing.num_experts}, k {routing.top_k}, {routing.score_func}",
            spec.merge,
        )
    console.print(table)
    for note in plan.notes:
        console.print(f"note: {note}")
