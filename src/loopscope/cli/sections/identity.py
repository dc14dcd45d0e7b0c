"""Which run this is, and what it holds."""

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run
from loopscope.cli.console import MISSING, make_table, plain, titled
from loopscope.cli.sections.rows import fetch
from loopscope.store import Attempt, LiveRange


def section(run: Run) -> list[RenderableType]:
    """Name, identity, attempts, and rows per table."""
    counts = [(name, fetch(run, name, f"select count(*) as n from {name}")[0]["n"]) for name in run.tables]
    written = ", ".join(f"{name} {rows}" for name, rows in counts if rows)
    return [
        Text(plain(f"{run.manifest.run_name or run.path.name}  {run.run_id}"), style="bold"),
        *_progress(run),
        *_attempts(run),
        Text(f"live rows: {written or 'none yet'}"),
    ]


def _progress(run: Run) -> list[RenderableType]:
    found = fetch(
        run,
        "loss",
        "select min(step) as first, max(step) as last, count(distinct step) as steps, "
        "max(tokens_seen) as tokens from loss",
    )
    if not found or not found[0]["steps"]:
        return [Text("no training step recorded yet", style="yellow")]
    row = found[0]
    tokens = f", {row['tokens']:,} tokens" if row["tokens"] else ""
    lines = [Text(f"steps {row['first']}–{row['last']} ({row['steps']} recorded){tokens}")]
    if gap := row["last"] - row["first"] + 1 - row["steps"]:
        lines.append(Text(f"{gap} step(s) between them have no loss row", style="yellow"))
    return [*lines]


def _attempts(run: Run) -> list[RenderableType]:
    if len(run.attempts) == 1:
        only = run.attempts[0]
        return [Text(f"1 attempt, {only.world_size} rank(s), on {_host(only)}")]
    if not run.attempts:
        return [Text("no attempt yet: training has not begun its first step", style="yellow")]
    rows = [
        (
            attempt.attempt,
            attempt.parent_attempt or MISSING,
            attempt.first_step,
            _steps(run.live.get(attempt.attempt)),
            attempt.world_size,
            _host(attempt),
        )
        for attempt in run.attempts
    ]
    columns = ["attempt", "parent", "first step", "live steps", "ranks", "host"]
    return titled("Attempts", make_table(columns, rows, left=["host"]))


def _steps(live: LiveRange | None) -> str:
    return "none" if live is None else f"{live.start}–{'' if live.end is None else live.end - 1}"


def _host(attempt: Attempt) -> str:
    return attempt.process.host if attempt.process else MISSING
