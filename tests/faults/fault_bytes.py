"""Truncation at every byte, and flipped bits: what is read is right, or missing and named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from fault_rows import write_step, wrong_rows

from loopscope.store import RunReader, RunStore, StoreOptions
from loopscope.store.journal.frames import Frame, scan
from loopscope.store.read.verify import verify_run

_OPTIONS = StoreOptions(tick_s=3600.0, on_error="raise")


def make_run(root: Path, *, steps: int, seal: bool) -> None:
    """A run with `steps` steps, sealed or left in its journal."""
    store = RunStore.create(root, options=_OPTIONS)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, steps + 1):
        write_step(writer, step)
    store.close(seal=seal)


def _read(root: Path) -> tuple[int, int, list[str]]:
    """(rows, wrong rows, problems)."""
    reader = RunReader(root)
    rows = {t: reader.read(t, live=False) for t in ("loss", "router")}
    wrong = sum(len(wrong_rows(t, table)) for t, table in rows.items())
    return sum(t.num_rows for t in rows.values()), wrong, [str(p) for p in reader.check_all()]


def truncate_journal(folder: Path, *, steps: int, stride: int = 1) -> dict[str, Any]:
    """Cut a journal at every `stride`th byte."""
    root = folder / "truncated"
    make_run(root, steps=steps, seal=False)
    path = next((root / "journal").glob("*.wal"))
    data = path.read_bytes()
    ends = [p.end for p in scan(data) if isinstance(p, Frame)][1:]
    figures = {"offsets": 0, "unreadable": 0, "worst_loss": 0, "wrong": 0}
    for size in range(0, len(data) + 1, stride):
        path.write_bytes(data[:size])
        figures["offsets"] += 1
        try:
            rows, wrong, _ = _read(root)
        except Exception:
            figures["unreadable"] += 1
            continue
        # Bytes of a record that had begun to be written are the one record that may be lost.
        begun = sum(1 for start in [0, *ends[:-1]] if start < size)
        figures["worst_loss"] = max(figures["worst_loss"], begun - rows)
        figures["wrong"] += wrong
    shutil.rmtree(root)
    return figures


def truncate_parts(folder: Path, *, steps: int, cuts: int, seed: int) -> dict[str, Any]:
    """Cut sealed parts: each must be named, with the rows that it costs."""
    root = folder / "cut"
    make_run(root, steps=steps, seal=True)
    generator = random.Random(seed)
    figures = {"cuts": 0, "unnamed": 0, "uncounted": 0, "wrong": 0}
    for path in sorted(root.glob("tables/*/part-*.parquet")):
        data = path.read_bytes()
        for _ in range(cuts):
            path.write_bytes(data[: generator.randrange(len(data))])
            reader = RunReader(root)
            rows = sum(reader.read(t, live=False).num_rows for t in ("loss", "router"))
            found = [p for p in reader.check_all() if path.name in p.where]
            figures["cuts"] += 1
            figures["unnamed"] += not found
            figures["uncounted"] += sum(p.lost_rows or 0 for p in found) + rows != steps * 4
        path.write_bytes(data)
    shutil.rmtree(root)
    return figures


def flip_bits(folder: Path, *, steps: int, flips: int, seed: int) -> dict[str, Any]:
    """Flip single bits of journals and parts: a value read back is the one written, or it is missing and named."""
    generator = random.Random(seed)
    figures = {"flips": 0, "unreadable": 0, "silently_wrong": 0, "missing_unnamed": 0}
    for seal in (False, True):
        root = folder / f"flipped-{seal}"
        make_run(root, steps=steps, seal=seal)
        files = sorted(root.glob("tables/*/part-*.parquet")) if seal else sorted(root.glob("journal/*.wal"))
        contents = {p: p.read_bytes() for p in files}
        # By size, so that every byte is as likely as every other.
        chosen = generator.choices(files, weights=[len(contents[p]) for p in files], k=flips // 2)
        for path in chosen:
            data = bytearray(contents[path])
            position = generator.randrange(len(data))
            data[position] ^= 1 << generator.randrange(8)
            path.write_bytes(data)
            figures["flips"] += 1
            try:
                rows, wrong, problems = _read(root)
            except Exception:
                figures["unreadable"] += 1
            else:
                figures["silently_wrong"] += wrong > 0
                figures["missing_unnamed"] += rows < steps * 4 and not problems
            path.write_bytes(contents[path])
        shutil.rmtree(root)
    return figures


def flip_documents(folder: Path, *, bits: Sequence[int] = range(8), stride: int = 1) -> dict[str, Any]:
    """Flip bits of every `stride`th byte of what says what the rows are: run.json, attempts, ledgers, live rows.

    Whatever a reader then says is what it said before, or the damage is named.
    """
    root = folder / "documents"
    _two_attempts(root)
    documents = [
        root / "run.json",
        *sorted(root.glob("attempts/*.json")),
        *sorted(root.glob("journal/*.sealed")),
    ]
    figures = {"flips": 0, "unreadable": 0, "silently_wrong": 0, "wrong": 0, "harmless": 0}
    whole = _said(RunReader(root))
    for path in documents:
        for number, _ in enumerate(_flips(path, bits, stride)):
            figures["flips"] += 1
            try:
                reader = RunReader(root)
                named = bool(reader.problems)
                figures["harmless"] += not named
                figures["silently_wrong"] += not named and _said(reader) != whole
                # Rows are checked now and then: they take their time.
                if number % 60 == 0:
                    figures["wrong"] += any(wrong_rows(t, reader.read(t)) for t in ("loss", "router"))
            except Exception:
                figures["unreadable"] += 1
    # The derived table is for other engines: verify alone looks at it.
    table = root / "tables" / "attempt" / "attempts.parquet"
    rows = pq.read_table(table).to_pylist()
    for _ in _flips(table, bits, 32 * stride):
        figures["flips"] += 1
        named = bool(verify_run(root).problems)
        figures["harmless"] += not named
        figures["silently_wrong"] += not named and pq.read_table(table).to_pylist() != rows
    shutil.rmtree(root)
    return figures


def _flips(path: Path, bits: Sequence[int], stride: int) -> Iterator[None]:
    data = path.read_bytes()
    for position in range(0, len(data), stride):
        for bit in bits:
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            yield
    path.write_bytes(data)


def _two_attempts(root: Path) -> None:
    make_run(root, steps=4, seal=True)
    store = RunStore.open(root, options=_OPTIONS)
    writer = store.writer(attempt=store.claim_attempt(first_step=3, parent_attempt=1))
    write_step(writer, 3)
    store.close()


def _said(reader: RunReader) -> tuple[Any, ...]:
    """Everything that the documents tell."""
    return reader.manifest, reader.attempts, reader.live, reader.files.ledgers
