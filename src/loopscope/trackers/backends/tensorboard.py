"""TensorBoard: scalars, the spread of three metrics over visits, tables of visits and alerts as text.

The folder is the trainer's where it writes one (torchtitan's with ``metrics.enable_tensorboard``), through the
trainer's own writer: TensorBoard follows only the newest event file of a folder, so a second writer would hide the
first. Else it is `tensorboard` in the run's folder; a resumed attempt purges the steps that it trains again.
"""

from typing import Any

import numpy as np

from loopscope.alerts import AlertNotice
from loopscope.catalog.rows import evenly
from loopscope.trackers.protocol import Cell, StepValues, TrackerStart, VisitTable, alert_text
from loopscope.trackers.visits import DISTRIBUTIONS

PACKAGES = ("tensorboard",)
INSTALL = "pip install 'loopscope[tensorboard]'"

VISITS = "loopscope/visits"
ALERTS = "loopscope/alerts"
ABOUT = "loopscope/run"
TEXT_ROWS = 200
"""Visits of one text table; a longer page of text is hard to read."""


class TensorBoardTracker:
    """Writes into one `SummaryWriter`.

    Args:
        writer: takes the summaries.
        is_own: True where loopscope made it, and closes it.
    """

    own_keys = (VISITS, ALERTS, ABOUT, *(f"visits/{name}" for name in DISTRIBUTIONS))

    def __init__(self, writer: Any, *, is_own: bool) -> None:
        self._writer, self._is_own = writer, is_own
        self.where = str(writer.log_dir)

    def log(self, values: StepValues) -> None:
        """A scalar per key; at traced steps the histograms over visits, and where it is due the table."""
        for key, value in values.scalars.items():
            self._writer.add_scalar(key, value, values.step)
        if values.visits is None:
            return
        if values.scalars:  # a table that comes once more at the end had its histograms
            for name in DISTRIBUTIONS:
                if numbers := [x for x in values.visits.column(name) if np.isfinite(x)]:
                    self._writer.add_histogram(f"visits/{name}", np.asarray(numbers), values.step)
        if values.show_table:
            self._writer.add_text(VISITS, markdown(values.visits), values.step)

    def alert(self, notice: AlertNotice) -> None:
        """A text at the step of the alert."""
        text = f"**{notice.severity}: {notice.title}**\n\n{alert_text(notice)}"
        self._writer.add_text(ALERTS, text, notice.step)

    def close(self) -> None:
        """Close the writer where it is loopscope's own; else write out what it holds."""
        if self._is_own:
            self._writer.close()
        else:
            self._writer.flush()


def start(begin: TrackerStart) -> TensorBoardTracker:
    """Write into the trainer's folder, or into one of the run's own."""
    writer = begin.shared
    if writer is None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(
            str(begin.out / "tensorboard"), purge_step=begin.first_step if begin.attempt > 1 else None
        )
    about = {
        "run_id": begin.run_id,
        "run_name": begin.run_name,
        "path": str(begin.out.resolve()),
        "version": begin.version,
        "attempt": str(begin.attempt),
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in about.items())
    writer.add_text(ABOUT, f"| | |\n|---|---|\n{lines}", begin.first_step)
    return TensorBoardTracker(writer, is_own=begin.shared is None)


def markdown(table: VisitTable) -> str:
    """The table as Markdown, at most TEXT_ROWS visits evenly over the depth; what is missing is a dash."""
    rows = evenly(table.rows, TEXT_ROWS)
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    if left := len(table.rows) + table.left_out - len(rows):
        lines.append(f"\n{left} of {len(rows) + left} visits are left out, evenly over the depth.")
    return "\n".join(lines)


def _cell(value: Cell) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
