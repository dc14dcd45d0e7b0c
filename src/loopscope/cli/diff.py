"""`loopscope diff A B`: what is set differently, and what came out differently."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

import tyro
from rich.table import Table
from rich.text import Text

from loopscope.analysis import Run, open_run, open_runs
from loopscope.analysis.compare import (
    By,
    Difference,
    corpora_apart,
    differences,
    settings_between,
    window_of,
)
from loopscope.cli.console import make_console, make_table, number, plain, titled, working
from loopscope.errors import ConfigError

_TITLES = {
    "run": "Losses",
    "block": "By block",
    "loop_step": "By loop step",
    "layer": "By layer of the stack",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """Compare two runs, or two groups of runs that differ by their seeds.

    First the settings that differ, then every metric over the last steps that all runs have: by block, loop step
    and layer.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Folder of a run, or a quoted pattern such as 'runs/base-*' for several seeds."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The other side."""
    last: float = 0.2
    """Share of the common steps, from their end, that is compared."""

    def run(self) -> int:
        """Print both parts; 0.

        Raises:
            NotARunError: a side names no run.
            ConfigError: `last` is no share, or a run has no losses.
        """
        if not 0 < self.last <= 1:
            raise ConfigError(
                f"--last is {self.last}, expected a share above 0, 1 at most. Give one such as 0.2."
            )
        console = make_console()
        with working("reading the runs"):
            a, b = _side(self.a), _side(self.b)
            window = window_of([*a, *b], self.last)
            if window is None:
                raise ConfigError(
                    "a run has no row of the table loss yet, expected runs with at least one step."
                )
            settings = settings_between(a, b)
            found = {by: differences(a, b, window, by) for by in get_args(By)}
            apart = corpora_apart(a, b, window)
        console.print(f"A: {_named(a)}\nB: {_named(b)}\n", markup=False)
        if settings:
            columns = ("setting", "A", "B")
            table = make_table(columns, [(one.name, one.a, one.b) for one in settings], left=columns)
            console.print(*titled(f"Settings that differ: {len(settings)}", table), sep="\n")
        else:
            console.print(Text("Settings: the same", style="bold"))
        if hidden := sorted({name for run in (*a, *b) for name in run.manifest.redacted}):
            text = f"Not compared, for what looks like a secret in them is not kept: {', '.join(hidden)}"
            console.print(Text(plain(text), style="dim"))
        console.print(f"\nMeans over steps {window[0]} to {window[1]}; a visit counts as much as any other.")
        for by, rows in found.items():
            if rows:
                console.print()
                table = _table(rows, spread=len(a) > 1 or len(b) > 1)
                console.print(*titled(_TITLES[by], table), sep="\n")
        for name, why in apart.items():
            console.print(f"\nprobe_loss on {plain(name)}: {why}", markup=False)
        if len(a) > 1 and len(b) > 1:
            console.print("\n* the difference is above twice its standard error over the runs")
        return 0


def _side(path: str) -> list[Run]:
    return list(open_runs(path)) if any(sign in path for sign in "*?[") else [open_run(path, partial=True)]


def _named(runs: Sequence[Run]) -> str:
    return plain(", ".join(f"{run.manifest.run_name or run.path.name} ({run.path})" for run in runs))


def _table(rows: Sequence[Difference], *, spread: bool) -> Table:
    order = list(dict.fromkeys((row.table, row.metric) for row in rows))
    cells: list[dict[str, str | float | None]] = []
    previous = None
    for row in sorted(rows, key=lambda row: order.index((row.table, row.metric))):
        name = f"{row.table}.{row.metric}"
        cells.append({
            "metric": name if name != previous else "", "where": row.place, "A": row.a, "± A": number(row.spread_a, 2),
            "B": row.b, "± B": number(row.spread_b, 2), "B − A": row.change, "": "*" if row.beyond else "",
        })  # fmt: skip
        previous = name
    # What is known of several runs only.
    columns = [name for name in cells[0] if spread or name not in ("± A", "± B", "")]
    return make_table(columns, [[of[name] for name in columns] for of in cells], left=("metric", "where"))
