"""Reading back what trackers wrote, and trackers that only remember."""

import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "benches" / "lib"))

from loopscope.collect import ObservedWriter
from loopscope.trackers import TrackerObserver
from loopscope.trackers.protocol import StepValues


class TrackingWriter(ObservedWriter):
    """A writer with the trackers beside it, as a run has it."""

    def __init__(self, inner, start, *, observers=(), **about):
        behind = ObservedWriter(inner, observers)
        self._trackers = TrackerObserver(
            start, write=lambda row: behind.append("health", row), dropped=lambda: inner.dropped, **about
        )
        super().__init__(inner, [*observers, self._trackers], timed={"trackers": self._trackers})

    def __getattr__(self, name):
        return getattr(self._trackers, name)

    def close_trackers(self):
        self._trackers.close()


def records(folder):
    """Every record of the offline W&B runs below `folder`, run after run in the order of their start."""
    for path in sorted(Path(folder).glob("**/offline-run-*/*.wandb")):
        found = _records_of(path)
        # W&B's service writes the last records a moment after `finish` has returned.
        deadline = time.monotonic() + 30
        while not any(record.WhichOneof("record_type") == "exit" for record in found):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
            found = _records_of(path)
        yield from found


def _records_of(path):
    from store_writers import _log_records
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in _log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def history(folder):
    """The history rows of the offline W&B runs, as dictionaries; W&B's own bookkeeping but `_step` left out."""
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            rows.append({k: v for k, v in items.items() if not k.startswith("_") or k == "_step"})
    return rows


def wandb_config(folder):
    """The configuration of the offline runs, later values over earlier ones."""
    found = {}
    for record in records(folder):
        kind = record.WhichOneof("record_type")
        update = (
            record.config.update if kind == "config" else record.run.config.update if kind == "run" else ()
        )
        found |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in update}
    return found


def visit_tables(folder):
    """Path → content of the tables that W&B was given."""
    return {
        path: json.loads(path.read_text()) for path in Path(folder).glob("**/media/table/**/*.table.json")
    }


def events(folder):
    """The events of a TensorBoard folder, nothing sampled away."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"scalars": 0, "histograms": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


class Remembering:
    """A tracker that keeps what it is given; `fails_at` are the calls of `log` that raise, from 1."""

    where = "memory"
    own_keys = ()

    def __init__(self, fails_at=()):
        self.fails_at = set(fails_at)
        self.calls = 0
        self.steps: list[StepValues] = []
        self.alerts = []
        self.closed = False

    def log(self, values):
        self.calls += 1
        if self.calls in self.fails_at:
            raise ConnectionError("the tracker is gone")
        self.steps.append(values)

    def alert(self, notice):
        self.alerts.append(notice)

    def close(self):
        self.closed = True
