"""`loopscope plan`: the resolved capture plan, as a table and as YAML that can be edited and fed back."""

from dataclasses import dataclass

from loopscope.capture.files import dump_plan
from loopscope.capture.spec import CapturePlan
from loopscope.cli.console import make_console, make_table
from loopscope.cli.flags import ModelFlags
from loopscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(ModelFlags):
    """Print what would be captured where. Nothing is run, unless you ask to discover."""

    yaml: bool = False
    """Print YAML alone, to be redirected into a file."""
    discover: bool = False
    """Build the model with random weights and run one forward: a plan for a model that is not known, proven on it."""
    batch: str | None = None
    """With --discover: `package.module:function` that returns what the forward is called with; by default 2 × 16 random
    token ids."""

    def run(self) -> int:
        """Print the plan; 0, or 1 where none could be proven.

        Raises:
            ConfigError: --batch without --discover.
        """
        if self.discover:
            return self._discover()
        if self.batch is not None:
            raise ConfigError(
                "--batch is what a forward is called with, and without --discover nothing is run."
            )
        adapter = self.adapter()
        if not self.yaml:
            _print_table(adapter.plan)
        print(dump_plan(adapter.plan), end="")
        return 0

    def _discover(self) -> int:
        import torch

        from loopscope.capture.discover import discover
        from loopscope.capture.model_source import build_batch, build_model

        model = build_model(self.model, self.backend, device="cpu")
        ids = torch.randint(2, 16, (2, 16), generator=torch.Generator().manual_seed(0))
        batch = build_batch(self.batch) if self.batch is not None else {"input_ids": ids}
        found = discover(model, batch)
        print(found.yaml() if self.yaml else found, end="" if self.yaml else "\n")
        return 0 if found.plan is not None else 1


def _print_table(plan: CapturePlan) -> None:
    console = make_console()
    columns = ("module", "layer", "calls", "captured", "routing", "merge")
    rows = [
        (
            name,
            "" if spec.layer is None else spec.layer,
            "?" if spec.calls is None else spec.calls,
            "\n".join(f"{tensor}: {source}" for tensor, source in spec.tensors.items()),
            ""
            if spec.routing is None
            else f"E {spec.routing.num_experts}, k {spec.routing.top_k}, {spec.routing.score_func}",
            spec.merge,
        )
        for name, spec in plan.items()
    ]
    console.print(make_table(columns, rows, left=("module", "captured", "routing", "merge")))
    for note in plan.notes:
        console.print(f"note: {note}")
