"""`loopscope plan`: the resolved capture plan, as a table and as YAML that can be edited and fed back."""

from dataclasses import dataclass

from loopscope.capture.files import dump_plan
from loopscope.capture.spec import CapturePlan
from loopscope.cli.console import make_console, make_table
from loopscope.cli.flags import ModelFlags


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(ModelFlags):
    """Print what would be captured where. Nothing is run."""

    yaml: bool = False
    """Print YAML alone, to be redirected into a file."""

    def run(self) -> int:
        """Print the plan; 0."""
        adapter = self.adapter()
        if not self.yaml:
            _print_table(adapter.plan)
        print(dump_plan(adapter.plan), end="")
        return 0


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
