"""`loopscope capabilities`: which metrics a model can really give, without running it."""

from dataclasses import dataclass

from loopscope.capture.capabilities import synthesize
from loopscope.capture.requirements import requirements_by_metric
from loopscope.cli.console import make_console, make_table
from loopscope.cli.flags import ModelFlags


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities(ModelFlags):
    """List every metric as direct, transform (derived exactly) or absent, with the reason."""

    require: tuple[str, ...] = ()
    """Metrics that must be there; exit status 2 where one is absent."""

    def run(self) -> int:
        """Print facts and table; 0, or 2 where a required metric is absent."""
        adapter = self.adapter()
        support = adapter.backend_support()
        found = synthesize(requirements_by_metric(), support)
        console = make_console()
        console.print(f"{type(adapter.model).__name__} on {self.backend}")
        facts = ("fact", "value")
        console.print(make_table(facts, support.facts().items(), left=facts))
        for note in adapter.plan.notes:
            console.print(f"note: {note}")
        columns = ("metric", "how", "reason")
        for table in dict.fromkeys(owner for owner, _ in found):
            rows = [
                (name, item.status, item.reason) for (owner, name), item in found.items() if owner == table
            ]
            console.print(table, make_table(columns, rows, left=columns), sep="\n")
        found.require(self.require)
        return 0
