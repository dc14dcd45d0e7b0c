"""`loopscope support`: which settings a task on a backend does not honour."""

from dataclasses import dataclass
from typing import Literal

from loopscope.capture.registry import TASKS, adapters, resolve_targets
from loopscope.capture.support import gaps, is_reviewed
from loopscope.cli.console import make_console, make_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """List, per task and backend, every setting that is ignored or rejected, and why."""

    task: Literal["pretrain", "sft", "probe"] | None = None
    """Only this task."""
    backend: str | None = None
    """Only this backend: torchtitan, torch, transformers, mlx, or one that a package registered."""

    def run(self) -> int:
        """Print the table; 0, or 2 where the pair is not supported at all."""
        console = make_console()
        for backend in adapters() if self.backend is None else (self.backend,):
            for task in TASKS if self.task is None else (self.task,):
                if self.task is None and task not in resolve_targets(backend):
                    console.print(f"{task} on {backend}: no adapter\n")
                    continue
                resolve_targets(backend, task)
                if not is_reviewed(task, backend):
                    console.print(f"{task} on {backend}: not reviewed, so nothing is claimed\n")
                    continue
                columns = ("setting", "status", "why")
                rows = [(entry.field, entry.status, entry.reason) for entry in gaps(task, backend)]
                console.print(f"{task} on {backend}", make_table(columns, rows, left=columns), sep="\n")
        return 0
