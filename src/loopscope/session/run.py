"""`Loopscope`: one process's part in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import loopscope
from loopscope.alerts import NoticeSink
from loopscope.collect import (
    Collector,
    NullWriter,
    ObservedWriter,
    ProbeCorpus,
    RankReducer,
    RowContext,
    RowObserver,
    RowWriter,
)
from loopscope.errors import CheckpointMismatchError, TraceError
from loopscope.session.alerting import alert_observer, with_alerts
from loopscope.session.config import LoopscopeConfig
from loopscope.session.protocols import Decide, Encoded, TracedModel
from loopscope.session.schedule import is_probe_step, is_trace_step
from loopscope.session.system import start_system
from loopscope.session.versions import versions
from loopscope.store import RunStore, StoreOptions
from loopscope.store.attempts import read_attempts
from loopscope.store.mirror.remote import refuse_mirror
from loopscope.store.redact import redact
from loopscope.store.write.journal_writer import JournalWriter
from loopscope.system import SystemSampler
from loopscope.trace import TraceMeta, VisitSpec
from loopscope.trackers import TrackerObserver, TrackerStart, start_trackers

T = TypeVar("T")


class Loopscope:
    """One process's part in a run, in three calls: `open`, `begin_attempt`, `close`.

    `open` creates or finds the run directory. `begin_attempt` comes in the first training step, when it is known
    which checkpoint was loaded; from then on `collector` is there. In a plain single-process loop `start(model)`
    does both::

        config = Loopscope.Config(out="runs/mine", trace_every=10)
        with Loopscope(config) as scope:
            collector = scope.start(model)
            for step in range(1, steps + 1):
                scope.begin_step(step)
                ...
    """

    Config: ClassVar = LoopscopeConfig

    def __init__(self, config: LoopscopeConfig) -> None:
        self.config = config
        self.collector: Collector | None = None
        """None until `begin_attempt`."""
        self.attempt: int | None = None
        """Number of this attempt; None until `begin_attempt`."""
        self.trackers: TrackerObserver | None = None
        """The trackers, on the rank that writes to them; None elsewhere, and where there are none."""
        self._shared_trackers: Mapping[str, Any] = {}
        self._sinks: Mapping[str, NoticeSink] = {}
        self._store: RunStore | None = None
        self._system: SystemSampler | None = None
        self._corpus: ProbeCorpus | None = None
        self._rank, self._world_size = 0, 1
        self._decide: Decide = _alone
        self._reducer: RankReducer | None = None
        self._expected: tuple[VisitSpec, ...] = ()

    @property
    def run_id(self) -> str:
        """UUIDv7 of the run. TraceError before `open`."""
        return self._opened().run_id

    @property
    def last_attempt(self) -> int | None:
        """Number of the newest attempt of the run so far; None where there is none. TraceError before `open`."""
        store = self._opened()
        return max((a.attempt for a in read_attempts(store.path)[0]), default=None)

    def open(
        self,
        *,
        expected_visits: Iterable[VisitSpec],
        meta: TraceMeta | None = None,
        rank: int = 0,
        world_size: int = 1,
        decide: Decide | None = None,
        reducer: RankReducer | None = None,
        configuration: Mapping[str, object] | None = None,
    ) -> None:
        """Create the run, or find the one to resume. Collective where there is more than one rank.

        Args:
            expected_visits: the visits that the model's configuration promises, at its largest R.
            meta: of the model, for the manifest.
            rank: this process's rank.
            world_size: number of ranks.
            decide: runs a function on rank 0 and gives its result to all ranks; not needed with one rank.
            reducer: merges over ranks: rows are then global and rank 0 alone writes. Without it every rank writes
                rows of its own, labelled `rank_local`.
            configuration: the trainer's, as plain data, for the manifest.

        Raises:
            RunExistsError: `out` holds a run and `resume` is off, or another process writes it.
            NotARunError: `resume` is on and `out` holds no run.
            StoreError: `out` cannot be written.
            ConfigError: nothing can be written to `mirror`.
        """
        self._rank, self._world_size, self._decide = rank, world_size, decide or _alone
        self._expected, self._reducer = tuple(expected_visits), reducer

        def create() -> str:
            self._sinks = (
                self.config.alerts.sinks()
            )  # a wrong destination stops the run before its folder exists
            if self.config.mirror and not self.config.resume:
                refuse_mirror(self.config.mirror, self.config.out, None)
            self._store = self._create(meta, dict(configuration or {}))
            if self.config.mirror:
                self._store.mirror_to(self.config.mirror)
            return self._store.run_id

        run_id = self._decide(create)
        if self._store is None:
            self._store = RunStore.open(self.config.out, options=self._options())
        if self._store.run_id != run_id:
            raise CheckpointMismatchError(
                f"rank {rank} finds run {self._store.run_id} in {self.config.out}, rank 0 finds {run_id}; expected "
                "one folder that all ranks see. Put `out` on a file system that all hosts share."
            )

    def use_corpus(self, corpus: Encoded) -> None:
        """Tell which corpus the probes run over; before `begin_attempt` or between probes."""
        self._corpus = ProbeCorpus(
            name=corpus.name,
            hash=corpus.corpus_hash,
            strata=corpus.strata,
            token_ids=getattr(corpus, "input_ids", None),
            first_token_dropped=getattr(corpus, "dropped_first_token", False),
        )
        if self.collector is not None:
            self.collector.corpus = self._corpus

    def share_trackers(self, shared: Mapping[str, Any]) -> None:
        """Tell what the trainer itself has started; before `begin_attempt`.

        Args:
            shared: tracker name → the `wandb.Run` or `SummaryWriter` to write into, or the exception that kept the
                trainer from starting it.
        """
        self._shared_trackers = dict(shared)

    def begin_attempt(
        self, *, first_step: int = 1, parent_run_id: str | None = None, parent_attempt: int | None = None
    ) -> Collector:
        """Claim the next attempt and make the collector. Collective where there is more than one rank.

        Args:
            first_step: the first step this attempt trains: restored step + 1.
            parent_run_id: the run that wrote the checkpoint that was loaded; None where none was loaded.
            parent_attempt: the attempt that wrote it.

        Raises:
            CheckpointMismatchError: the checkpoint belongs to another run than the one being resumed.
        """
        store = self._opened()
        if self.config.resume and parent_run_id is not None and parent_run_id != store.run_id:
            raise CheckpointMismatchError(
                f"the checkpoint belongs to run {parent_run_id}, but {self.config.out} holds run {store.run_id}; "
                "expected a checkpoint of the run being resumed. Resume with the folder of that run, or start a "
                "new run from the checkpoint without resume."
            )
        own_parent = parent_attempt if parent_run_id == store.run_id else None

        def claim() -> int:
            changes: dict[str, object] = {}
            if self._corpus is not None:
                changes["corpora"] = {self._corpus.name: self._corpus.hash}
            if parent_run_id is not None and parent_run_id != store.run_id:
                # A branch from another run's checkpoint: a run of its own that says where it came from.
                changes |= {"parent_run_id": parent_run_id, "parent_step": first_step - 1}
            changes |= with_alerts(store.manifest.configuration, self.config.alerts)
            if changes:
                store.update_manifest(**changes)
            return store.claim_attempt(
                first_step=first_step, parent_attempt=own_parent, world_size=self._world_size
            ).attempt

        self.attempt = self._decide(claim)
        context = RowContext(
            run_id=store.run_id, attempt=self.attempt, rank=self._rank, world_size=self._world_size
        )
        writer: RowWriter = NullWriter()
        own: JournalWriter | None = None
        writes = self._reducer is None or self._reducer.is_writer or self.config.per_rank
        if writes:
            own = store.writer(
                attempt=self.attempt, writer=f"r{self._rank:05d}", on_error=self.config.on_error
            )
            writer = own
            if self.config.mirror and self._rank:
                # Rank 0 copies the run, but cannot know when the others have closed.
                store.mirror_to(self.config.mirror, only=own.name)
        else:
            store.attend(attempt=self.attempt, name=f"r{self._rank:05d}")
        alerts = None
        if writes and self.config.alerts.enabled:
            # The rules read the rows that were written; an alert is a health row and a log line.
            alerts = alert_observer(
                writer, store, self.config, sinks=self._sinks, context=context, parent_attempt=own_parent
            )
        judged: list[RowObserver] = [] if alerts is None else [alerts]
        self._start_trackers(ObservedWriter(writer, judged), context, first_step)
        if self.trackers is not None:
            if alerts is not None:
                alerts.add_sinks({tracker.name: tracker.alert for tracker in self.trackers.trackers})
            writer = ObservedWriter(writer, [*judged, self.trackers], timed={"trackers": self.trackers})
        elif judged:
            writer = ObservedWriter(writer, judged)
        self.collector = Collector(
            writer,
            context=context,
            expected_visits=self._expected,
            on_error=self.config.on_error,
            corpus=self._corpus,
            reducer=self._reducer,
            per_rank=self.config.per_rank,
        )
        self._system = start_system(
            store, own, attempt=self.attempt, rank=self._rank, every_s=self.config.system_every_s,
            step=self.collector.last_step,
        )  # fmt: skip
        return self.collector

    def start(self, model: TracedModel) -> Collector:
        """`open` and `begin_attempt` in one, for a single process that starts at step 1."""
        self.open(expected_visits=model.expected_visits(), meta=model.trace_meta())
        return self.begin_attempt()

    def begin_step(self, step: int, *, tokens_seen: int | None = None) -> None:
        """Note when `step` begins, and the training tokens of all ranks up to and including it."""
        if self.collector is not None:
            self.collector.begin_step(step, tokens_seen=tokens_seen)

    def is_trace_step(self, step: int, last_step: int | None = None) -> bool:
        """True where `step` (1-based) is to be traced; the same on every rank."""
        return is_trace_step(step, every=self.config.trace_every, last_step=last_step)

    def is_probe_step(self, step: int, last_step: int | None = None) -> bool:
        """True where the probe is to run after `step`; the same on every rank."""
        return is_probe_step(step, every=self.config.probe_every, last_step=last_step)

    def flush(self, durable: bool = False) -> None:
        """Hand over buffered rows; to the disk where `durable`. Does nothing before `begin_attempt`."""
        if self.collector is not None:
            self.collector.flush(durable=durable)

    def close(self) -> None:
        """Write what is left, close the run. A second call does nothing."""
        if self._system is not None:
            self._system.stop()
        self._system = None
        collector, self.collector = self.collector, None
        if collector is not None:
            collector.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __enter__(self) -> Loopscope:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.close()

    def _start_trackers(self, writer: RowWriter, context: RowContext, first_step: int) -> None:
        """Start the trackers, whose own rows go to `writer`. Collective: one that may not fail stops every rank."""
        if not self.config.trackers:
            return
        begin = TrackerStart(
            run_id=context.run_id,
            run_name=self.config.name,
            attempt=context.attempt,
            first_step=first_step,
            out=self.config.out,
            config=redact(self.config.as_plain()).value,
            version=loopscope.__version__,
        )

        def start() -> bool:
            self.trackers = TrackerObserver(
                lambda tell: start_trackers(
                    self.config.trackers,
                    begin,
                    shared=self._shared_trackers,
                    on_error=self.config.on_error,
                    tell=tell,
                ),
                write=lambda row: writer.append("health", row),
                dropped=lambda: writer.dropped,
                keys={
                    **context.keys("rank_local" if self._reducer is None else "global"),
                    "step": first_step,
                },
                attempt=context.attempt,
                on_error=self.config.on_error,
            )
            return True

        self._decide(start)  # rank 0 alone: it writes the rows of the run

    def _opened(self) -> RunStore:
        if self._store is None:
            raise TraceError("the run is not open; expected Loopscope.open(...) before this call")
        return self._store

    def _create(self, meta: TraceMeta | None, configuration: dict[str, object]) -> RunStore:
        return RunStore.create(
            self.config.out,
            run_name=self.config.name,
            resume=self.config.resume,
            expected_visits=[asdict(visit) for visit in self._expected],
            trace_meta=None if meta is None else asdict(meta),
            configuration={"loopscope": self.config.as_plain(), "trainer": configuration},
            versions=versions(),
            options=self._options(),
        )

    def _options(self) -> StoreOptions:
        return StoreOptions(preempted_by=self.config.preempted_by)


def _alone(make: Callable[[], T], /) -> T:
    return make()
