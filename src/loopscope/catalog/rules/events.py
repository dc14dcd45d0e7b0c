"""What the rules over health events share: a row that is more than information is an alert of the rule of its event."""

from collections.abc import Callable

import numpy as np

from loopscope.catalog.row_batch import RowBatch, Subjects
from loopscope.catalog.rule import Judgement, Memory, Readings, RuleBounds

_COLUMNS = ("event", "severity", "unrolled_pos", "count", "detail")


def of_events(belongs: Callable[[str], bool]) -> Judgement:
    """Judges the health rows of the events that belong to a rule."""

    def judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings | None:
        event, severity = batch.column("event"), batch.column("severity")
        rows = [
            i
            for i, (name, how) in enumerate(zip(event, severity, strict=True))
            if how is not None and how != "info" and name is not None and belongs(name)
        ]
        if not rows:
            return None
        names = list(dict.fromkeys(event[i] for i in rows))
        position, count = batch.ints("unrolled_pos"), batch.floats("count")

        def text(i: int) -> str:
            at = rows[i]
            where = f" at depth {position[at]}" if position[at] >= 0 else ""
            number = "no detail" if np.isnan(count[at]) else f"{count[at]:.0f}"
            return f"{event[at]}{where}: {batch.column('detail')[at] or number}"

        return Readings(
            np.array(rows),
            np.where(count[rows] > 0, count[rows], 1.0),
            np.full(len(rows), np.inf),
            lambda: Subjects(np.array([names.index(event[i]) for i in rows]), names),
            text,
            critical=np.array([severity[i] == "critical" for i in rows]),
        )

    return Judgement(table="health", columns=_COLUMNS, judge=judge)
