"""The writers that `store.py` compares. Each takes the same numbers, and gives one metric's history back."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

POSITIONS = 34
SCALARS = 40
VISIT_SCALARS = 30
TRACE_EVERY = 10

_LOSS = [
    "task_loss",
    "lb_loss",
    "lb_loss_factor",
    "z_loss",
    "z_loss_factor",
    "total_loss",
    "task_loss_sum",
    "other_loss",
    "grad_norm",
    "lr",
    "closure_error",
    "elapsed_s",
]
_VISIT = [
    "load_entropy_ratio",
    "effective_experts",
    "load_kl_uniform",
    "load_cv",
    "maxvio_count",
    "minvio_count",
    "avgvio_count",
    "maxvio_micro_mean",
    "maxvio_rank_max",
    "maxvio_mass",
    "mass_to_count_ratio",
    "dead_expected",
    "lb_loss",
    "lb_loss_micro_mean",
    "token_entropy_mean",
    "token_entropy_ratio",
    "mutual_information",
    "top1_prob_mean",
    "topk_mass_mean",
    "margin_mean",
    "margin_min",
    "margin_p25",
    "margin_p50",
    "margin_p75",
    "selection_gap_mean",
    "selection_gap_min",
    "selection_gap_p01",
    "z_mean",
    "z_std",
    "z_min",
]
HISTORY = "task_loss"


class Writer:
    """A writer under test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        """One step in the form that the writer takes; not timed. 40 scalars, traced: 30 for each of 34 visits."""
        raise NotImplementedError

    def write(self, step: int, prepared: Any) -> None:
        """Write it; timed."""
        raise NotImplementedError

    def close(self) -> None:
        """End in the ordinary way."""

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        """(step, value) of the first scalar, as a reader finds it."""
        raise NotImplementedError


def _flat(scalars: list[float], visits: list[list[float]]) -> dict[str, float]:
    row = {f"s{i}": v for i, v in enumerate(scalars)}
    for position, values in enumerate(visits):
        row.update({f"router/{position}/{n}": v for n, v in zip(_VISIT, values, strict=True)})
    return row


class Ours(Writer):
    """loopscope as it comes."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from loopscope.store import RunStore, StoreOptions

        self.store = RunStore.create(folder / "run", options=StoreOptions(**self.options))
        self.writer = self.store.writer(attempt=self.store.claim_attempt(first_step=1))

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        common = {"step": step, "aggregation_scope": "global", "world_size": 1}
        loss = {**common, **dict(zip(_LOSS, scalars, strict=False))}
        # The rest of the step's scalars: one summary row of 28.
        rows = [{**common, "unrolled_pos": 999, **dict(zip(_VISIT, scalars[12:], strict=False))}]
        for position, values in enumerate(visits):
            rows.append({**common, "unrolled_pos": position, **dict(zip(_VISIT, values, strict=True))})
        return loss, rows

    def write(self, step: int, prepared: Any) -> None:
        loss, rows = prepared
        self.writer.append("loss", loss)
        self.writer.append_many("router", rows)

    def close(self) -> None:
        self.store.close()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        from loopscope.analysis import open_run

        table = open_run(folder / "run").arrow("loss", columns=["step", HISTORY])
        return list(zip(table["step"].to_pylist(), table[HISTORY].to_pylist(), strict=True))


class OursSealing(Ours):
    """loopscope, sealing every half megabyte instead of every 64."""

    options: ClassVar[dict[str, Any]] = {"rotate_bytes": 1 << 19, "tick_s": 0.05}


class OursDurable(Ours):
    """loopscope with an fsync twenty times a second."""

    options: ClassVar[dict[str, Any]] = {"fsync_s": 0.05, "tick_s": 0.05}


class JsonLines(Writer):
    """JSON lines, flushed to the kernel after every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = (folder / "log.jsonl").open("w", encoding="utf-8")

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        rows = [{"step": step, **{f"s{i}": v for i, v in enumerate(scalars)}}]
        for position, values in enumerate(visits):
            rows.append({"step": step, "position": position, **dict(zip(_VISIT, values, strict=True))})
        return rows

    def write(self, step: int, prepared: Any) -> None:
        for row in prepared:
            self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        found = []
        with (folder / "log.jsonl").open(encoding="utf-8") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if "s0" in row:
                    found.append((row["step"], row["s0"]))
        return found


class Sqlite(Writer):
    """SQLite with a write-ahead log, one transaction per step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.db = sqlite3.connect(folder / "log.db", isolation_level=None)
        self.db.execute("pragma journal_mode = wal")
        self.db.execute("pragma synchronous = normal")
        names = ", ".join(f"s{i} real" for i in range(SCALARS))
        self.db.execute(f"create table scalars (step integer primary key, {names})")
        self.db.execute(
            f"create table visits (step integer, position integer, {', '.join(f'{n} real' for n in _VISIT)})"
        )
        self.scalar = f"insert into scalars values ({','.join('?' * (SCALARS + 1))})"
        self.visit = f"insert into visits values ({','.join('?' * (VISIT_SCALARS + 2))})"

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        return [step, *scalars], [[step, p, *v] for p, v in enumerate(visits)]

    def write(self, step: int, prepared: Any) -> None:
        self.db.execute("begin")
        self.db.execute(self.scalar, prepared[0])
        self.db.executemany(self.visit, prepared[1])
        self.db.execute("commit")

    def close(self) -> None:
        self.db.close()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        db = sqlite3.connect(folder / "log.db")
        try:
            return db.execute("select step, s0 from scalars order by step").fetchall()
        finally:
            db.close()


class OneParquet(Writer):
    """One Parquet file, a row group every 100 steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.pa = pa
        self.scalars: list[list[float]] = []
        self.visits: list[list[float]] = []
        self.scalar_schema = pa.schema(
            [("step", pa.int64()), *[(f"s{i}", pa.float64()) for i in range(SCALARS)]]
        )
        self.visit_schema = pa.schema(
            [("step", pa.int64()), ("position", pa.int32()), *[(n, pa.float64()) for n in _VISIT]]
        )
        self.files = [
            pq.ParquetWriter(folder / "scalars.parquet", self.scalar_schema, compression="zstd"),
            pq.ParquetWriter(folder / "visits.parquet", self.visit_schema, compression="zstd"),
        ]

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        return [step, *scalars], [[step, p, *v] for p, v in enumerate(visits)]

    def write(self, step: int, prepared: Any) -> None:
        self.scalars.append(prepared[0])
        self.visits += prepared[1]
        if len(self.scalars) == 100:
            self._flush()

    def _flush(self) -> None:
        for file, rows, schema in zip(
            self.files, (self.scalars, self.visits), (self.scalar_schema, self.visit_schema), strict=True
        ):
            if rows:
                columns = [
                    self.pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), schema, strict=True)
                ]
                file.write_table(self.pa.Table.from_arrays(columns, schema=schema))
        self.scalars, self.visits = [], []

    def close(self) -> None:
        self._flush()
        for file in self.files:
            file.close()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        import pyarrow.parquet as pq

        table = pq.read_table(folder / "scalars.parquet", columns=["step", "s0"])
        return list(zip(table["step"].to_pylist(), table["s0"].to_pylist(), strict=True))


class TensorBoard(Writer):
    """TensorBoard's event file, through torch's SummaryWriter."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tb"))

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        return _flat(scalars, visits)

    def write(self, step: int, prepared: Any) -> None:
        for name, value in prepared.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
        events.Reload()
        return [(e.step, e.value) for e in events.Scalars("s0")] if "s0" in events.Tags()["scalars"] else []


class WandbOffline(Writer):
    """wandb, offline."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ.update(
            WANDB_MODE="offline", WANDB_DIR=str(folder), WANDB_SILENT="true", WANDB_CONSOLE="off"
        )
        import wandb

        self.run = wandb.init(
            project="bench", dir=str(folder), mode="offline",
            settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True, silent=True, console="off"),
        )  # fmt: skip

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        return _flat(scalars, visits)

    def write(self, step: int, prepared: Any) -> None:
        self.run.log(prepared, step=step)

    def close(self) -> None:
        self.run.finish()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        from wandb.proto import wandb_internal_pb2

        found: list[tuple[int, float]] = []
        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            for data in _log_records(path.read_bytes()):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") != "history":
                    continue
                items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                if "s0" in items:
                    found.append((int(items["_step"]), float(items["s0"])))
        return found


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of wandb's file: LevelDB's log format, in blocks of 32 KiB, behind a header of 7 bytes."""
    block, position, parts = 32768, 7, []
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        if kind == 0 or position + 7 + length > len(data):
            return
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


class Trackio(Writer):
    """trackio, local."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        self.trackio = trackio
        trackio.init(project="bench", name="run", embed=False)

    def prepare(self, step: int, scalars: list[float], visits: list[list[float]]) -> Any:
        return _flat(scalars, visits)

    def write(self, step: int, prepared: Any) -> None:
        self.trackio.log(prepared, step=step)

    def close(self) -> None:
        self.trackio.finish()

    @classmethod
    def history(cls, folder: Path) -> list[tuple[int, float]]:
        found = []
        for path in folder.glob("*.db"):
            db = sqlite3.connect(path)
            for step, metrics in db.execute("select step, metrics from metrics order by step"):
                row = json.loads(metrics)
                if "s0" in row:
                    found.append((step, row["s0"]))
            db.close()
        return found


WRITERS: dict[str, tuple[type[Writer], str | None]] = {
    "loopscope": (Ours, None),
    "loopscope, sealing": (OursSealing, None),
    "loopscope, fsync 20/s": (OursDurable, None),
    "JSON lines": (JsonLines, None),
    "SQLite WAL": (Sqlite, None),
    "one Parquet file": (OneParquet, None),
    "TensorBoard": (TensorBoard, "tensorboard"),
    "wandb offline": (WandbOffline, "wandb"),
    "trackio": (Trackio, "trackio"),
}
"""Name → writer, and the package that it needs."""
