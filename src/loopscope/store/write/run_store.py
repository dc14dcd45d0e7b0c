"""RunStore: a run directory that this process writes into."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from loopscope import __version__
from loopscope.errors import StoreError
from loopscope.store.attempts import create_attempt, find_attempt, merge_attempts, new_attempt, read_attempts
from loopscope.store.disk import LOCAL_DISK, Disk, writing_into
from loopscope.store.folder import RunFolder
from loopscope.store.manifest import (
    LAYOUT,
    Attempt,
    Manifest,
    new_manifest,
    read_manifest,
    refuse_existing,
    write_manifest,
)
from loopscope.store.mirror.remote import Remote, refuse_mirror
from loopscope.store.names import ATTEMPTS_DIR, JOURNAL_DIR, TABLES_DIR, check_writer
from loopscope.store.options import StoreOptions
from loopscope.store.read.files import last_seq
from loopscope.store.schema import TableSchema
from loopscope.store.seal.attempt_table import refresh_attempt_table
from loopscope.store.seal.seal_run import AbandonedWriters, sweep
from loopscope.store.seal.sealer import seal_all
from loopscope.store.tables import TABLES
from loopscope.store.write import endings
from loopscope.store.write.background import BackgroundThread
from loopscope.store.write.journal_chain import header_of
from loopscope.store.write.journal_writer import JournalWriter, OnError
from loopscope.store.write.mirrored import MirroredRun
from loopscope.store.write.ownership import Ownership
from loopscope.store.write.space import SpaceForecast

Tables = Mapping[str, TableSchema]
_log = logging.getLogger("loopscope.store")


class RunStore:
    """A run directory, open for writing. Rank 0 creates it and claims attempts; every rank may open it.

    Made by `create` and `open`.
    """

    def __init__(
        self, folder: RunFolder, manifest: Manifest, options: StoreOptions, disk: Disk, tables: Tables
    ) -> None:
        self._folder = folder
        self.manifest = manifest
        self.options = options
        self._disk, self._tables = disk, tables
        self._ownership = Ownership(disk, folder, manifest.run_id, options)
        self._writers: list[JournalWriter] = []
        self._mirror: MirroredRun | None = None
        self._background = BackgroundThread(folder, options)
        self._pid = os.getpid()

    @property
    def path(self) -> Path:
        """Where the run directory lies: where it was renamed, the new path."""
        return self._folder.path

    @property
    def run_id(self) -> str:
        """UUIDv7 of the run."""
        return self.manifest.run_id

    @property
    def seal_failures(self) -> int:
        """Sealings in the background that failed and are tried again; the rows are safe in their journals."""
        return self._background.seal_failures

    @property
    def last_error(self) -> str | None:
        """Why the last background chore failed; text."""
        return self._background.last_error

    @property
    def upload_failures(self) -> int:
        """Uploads that failed and were tried again."""
        return 0 if self._mirror is None else self._mirror.uploader.failures

    def mirror_to(self, remote: Remote | str, *, only: str | None = None) -> None:
        """Keep a copy of everything sealed on another filesystem, in the background.

        The journal stays here. An upload that fails is counted, noted as a health row and tried again; closing the
        store tries some more times. A remote that cannot be reached now is asked again later.

        Args:
            remote: the folder, or its address: a URL such as ``s3://bucket/runs/one``, or an absolute path.
            only: a writer whose parts alone go up, where another process checks the address and copies the rest.

        Raises:
            ConfigError: no filesystem reads the address, or its package is missing.
            RunExistsError: another run lies there.
        """
        if isinstance(remote, str) and only is None:
            refuse_mirror(remote, self.path, self.run_id)
        self._mirror = MirroredRun(
            self._folder, self.run_id, remote, self.options.retry_s, self._health, only
        )
        self._background.on_sealed = self._mirror.wake
        self._mirror.wake()

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        resume: bool = False,
        run_id: str | None = None,
        run_name: str = "",
        expected_visits: Sequence[Mapping[str, Any]] = (),
        trace_meta: Mapping[str, Any] | None = None,
        configuration: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        corpora: Mapping[str, str] | None = None,
        null_reasons: Mapping[str, Mapping[str, str]] | None = None,
        parent_run_id: str | None = None,
        parent_step: int | None = None,
        options: StoreOptions | None = None,
        disk: Disk = LOCAL_DISK,
        tables: Tables = TABLES,
    ) -> RunStore:
        """Make a run directory; with `resume`, open the one that is there.

        Raises:
            RunExistsError: the folder holds a run already (without `resume`).
            NotARunError: it holds none (with `resume`).
            ConfigError: it cannot be written.
        """
        root = Path(path).absolute()  # The training may change its folder.
        if resume:
            return cls.open(root, options=options, disk=disk, tables=tables)
        refuse_existing(root)
        manifest = new_manifest(
            run_id=run_id,
            run_name=run_name or root.name.encode(errors="replace").decode(),
            expected_visits=[dict(v) for v in expected_visits],
            trace_meta=None if trace_meta is None else dict(trace_meta),
            configuration=dict(configuration or {}),
            versions=dict(versions or {}),
            corpora=dict(corpora or {}),
            null_reasons={t: dict(r) for t, r in (null_reasons or {}).items()},
            parent_run_id=parent_run_id,
            parent_step=parent_step,
            schemas={name: schema.version for name, schema in tables.items()},
        )
        with writing_into(root):
            root.mkdir(parents=True, exist_ok=True)
            store = cls(RunFolder(root), manifest, options or StoreOptions(), disk, tables)
            _make_folders(disk, store._folder.pinned)
            store._ownership.own()
            try:
                # Whoever holds the lock decides; another process may have made the run while we waited.
                refuse_existing(root)
                store.manifest = write_manifest(disk, store._folder.pinned, manifest)
            except BaseException:
                store._ownership.disown()  # The next try, once there is space, must not meet our own lock.
                raise
        store._background.add(store._ownership.beat)
        return store

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        options: StoreOptions | None = None,
        disk: Disk = LOCAL_DISK,
        tables: Tables = TABLES,
    ) -> RunStore:
        """Open a run directory for writing.

        Raises:
            NotARunError: the folder holds no run.
            StoreError: run.json cannot be read.
            ConfigError: the folder cannot be written.
        """
        root = Path(path).absolute()
        manifest = read_manifest(root)
        if manifest.format > LAYOUT:
            raise StoreError(
                f"{root} has layout {manifest.format}, this loopscope {__version__} writes layout {LAYOUT}. Use the "
                f"version that made it ({manifest.loopscope_version}) or a later one."
            )
        with writing_into(root):
            folder = RunFolder(root)
            _make_folders(disk, folder.pinned)
        return cls(folder, manifest, options or StoreOptions(), disk, tables)

    def update_manifest(self, **changes: Any) -> None:
        """Change fields of run.json (expected_visits, corpora, ...); for the owner alone."""
        changed = msgspec.structs.replace(self.manifest, **changes)
        self.manifest = write_manifest(self._disk, self._folder.pinned, changed)

    def claim_attempt(
        self,
        *,
        first_step: int,
        parent_attempt: int | None = None,
        world_size: int = 1,
        torch_version: str | None = None,
    ) -> Attempt:
        """Claim the run's next attempt; rank 0 alone does this, in its first step, and tells the others.

        Args:
            first_step: restored step + 1.
            parent_attempt: the attempt that wrote the checkpoint that was loaded; None for a fresh start.
            world_size: ranks of this attempt.
            torch_version: version of torch that trains; from the manifest's versions where None.

        Raises:
            RunExistsError: another living process writes this run.
            ConfigError: a number is out of range, or the folder cannot be written.
        """
        wanted = new_attempt(
            self._folder.pinned, self.manifest, first_step, parent_attempt, world_size, torch_version
        )
        with writing_into(self.path):
            if self._ownership.own():
                self._background.add(self._ownership.beat)
            root = self._folder.pinned
            attempt = create_attempt(self._disk, root, wanted)
            self.update_manifest(attempts=merge_attempts(read_attempts(root)[0], self.manifest.attempts))
            refresh_attempt_table(root, disk=self._disk)
        self._ownership.unwritten = attempt.attempt
        folder = root / JOURNAL_DIR
        abandoned = AbandonedWriters(folder, attempt.attempt, self.options.grace_s, self._background.announce)
        abandoned()
        sweep(folder)
        self._background.add(abandoned)
        if self._mirror is not None:
            # The copy begins now, without a row: a remote that takes no files is noticed now, not at the first sealing.
            self._mirror.wake()
        return attempt

    def writer(
        self, *, attempt: int | Attempt, writer: str = "r0", on_error: OnError | None = None
    ) -> JournalWriter:
        """The writer of one process's rows.

        Args:
            attempt: what rank 0 claimed, or its number.
            writer: name of this process within the run, such as "r0"; letters, digits and underscores.
            on_error: instead of the store's own option.

        Raises:
            RunExistsError: a living process writes under this name in this attempt.
            StoreError: the attempt is not there.
            ConfigError: the name cannot be part of a file name, or the folder cannot be written.
        """
        check_writer(writer)
        options = self.options if on_error is None else replace(self.options, on_error=on_error)
        record = (
            attempt if isinstance(attempt, Attempt) else find_attempt(self._folder.pinned, attempt, self.path)
        )
        seq = last_seq(self._folder.pinned, record.attempt, writer)
        header = header_of(record, self.run_id, writer, seq, self._tables)
        with writing_into(self.path):
            lock = self._ownership.lock(f"{record.attempt:05d}-{writer}", records_signals=True)
        endings.begin(lock)
        self._ownership.unwritten = 0
        rows = JournalWriter(
            folder=self._folder,
            header=header,
            tables=self._tables,
            disk=self._disk,
            lock=lock,
            options=options,
            on_rotated=self._background.announce,
            on_closed=self._forget,
            seal_on_close=self._seal_writer,
        )
        if self._ownership.owns:  # one of a run's writers looks at the disk for all
            rows.space = SpaceForecast(lambda: self._folder.pinned)
        self._writers.append(rows)
        self._background.add(rows.tick)
        if self._mirror is not None:
            self._mirror.tell()
        return rows

    def attend(self, *, attempt: int, name: str) -> None:
        """For a process of an attempt that writes no rows: an error that ends it is recorded all the same.

        Args:
            attempt: what rank 0 claimed.
            name: of this process within the run, such as "r3".
        """
        self._ownership.attend(f"{attempt:05d}-{check_writer(name)}")

    def close(self, seal: bool = True) -> None:
        """Close every writer, and give the run back."""
        if os.getpid() != self._pid:
            return
        self._ownership.end_attendance()
        for writer in list(self._writers):
            writer.close(seal=seal)
        self._background.stop()
        if seal and (left := self._background.take_waiting("")):
            for failure in seal_all(self._folder.pinned, left, disk=self._disk, tables=self._tables):
                _log.warning("loopscope: sealing failed, the journal is kept (%s)", failure)
        if self._mirror is not None:
            self._mirror.close()
        self._ownership.disown()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _seal_writer(self, writer: JournalWriter) -> None:
        names = self._background.take_waiting(f"{writer.attempt:05d}-{writer.name}-")
        if failures := seal_all(self._folder.pinned, names, disk=self._disk, tables=self._tables):
            raise StoreError("; ".join(failures))

    def _health(self, row: Mapping[str, object]) -> bool:
        """Write a health row; False where there is no writer at the moment."""
        writer = next((w for w in self._writers if not w.closed), None)
        if writer is not None:
            writer.append("health", {"step": writer.last_step, **row})
        return writer is not None

    def _forget(self, writer: JournalWriter) -> None:
        endings.end(writer.lock)
        self._background.remove(writer.tick)
        if writer in self._writers:
            self._writers.remove(writer)


def _make_folders(disk: Disk, root: Path) -> None:
    for folder in (JOURNAL_DIR, ATTEMPTS_DIR, TABLES_DIR):
        disk.mkdir(root / folder)
