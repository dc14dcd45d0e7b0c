"""The deep probe: measurements too expensive for every probe, over the same corpus, with a period of their own."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from loopscope.collect import Collector
from loopscope.errors import ConfigError, ProbeError, TraceError
from loopscope.probe.deep_perturbation import Perturbations
from loopscope.probe.deep_readout import Readouts
from loopscope.probe.deep_routing import Chosen, RoutingRecorder, Tables
from loopscope.probe.deep_rows import margin_rows, saturation_rows, specialisation_rows
from loopscope.probe.deep_spill import CleanVisits
from loopscope.probe.encode import EncodedCorpus
from loopscope.trace import ACTIVE_TRACE_SINK, StreamingWindow, TracePoint
from loopscope.trace.isolation import isolated_forward
from loopscope.trace.probe import model_forward

Scope = Literal["batch", "document"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSettings:
    """What a deep probe does."""

    shuffle_scope: Scope
    """Where the null of the margin permutes a column of scores: over all tokens, or within a document. No
    default, since the two answer different questions."""
    readout: Literal["tail", "head"] = "tail"
    """Read out through the tail layers, or straight through the final norm and the head."""
    num_shuffles: int = 20
    """Shuffles behind the margin's null."""
    num_directions: int = 4
    """Random directions of the perturbation; 0 leaves it out."""
    seed: int = 0
    """Of everything random; the same at every step, so that probes compare."""

    def __post_init__(self) -> None:
        for name, known in (("shuffle_scope", ("batch", "document")), ("readout", ("tail", "head"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {known[0]!r} or {known[1]!r}")
        for name, least in (("num_shuffles", 1), ("num_directions", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected >= {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepResult:
    """What one deep probe gives; rows without run-level keys."""

    tables: Tables
    """Table → rows."""
    skipped: tuple[str, ...]
    """What could not be measured, and why; text."""
    chosen: Chosen
    """`unrolled_pos` → chosen experts [D, S, k]: what the next probe's saturation is measured against."""

    def record(self, collector: Collector, step: int) -> None:
        """Write the rows, and a health row for each measurement that was left out."""
        collector.record_rows(step, self.tables)
        for text in self.skipped:
            collector.record_event(step, "probe_skipped", "warn", detail=text)


def run_deep_probe(
    model: nn.Module,
    corpus: EncodedCorpus,
    settings: DeepSettings,
    *,
    batch_size: int | None = None,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    before: tuple[int, Chosen] | None = None,
    keep: bool = True,
) -> DeepResult:
    """Run the corpus through `model` several times and reduce what was seen; training goes on untouched.

    A model with ``loop_readout(h, readout=...) -> logits`` gets readouts, one with ``loop_entry() -> Module``
    (the module whose first argument is the loop's state) perturbations; what a model lacks is in `skipped`.
    Collective where the model is sharded: every rank runs the same forwards. An error in loopscope's own code
    is raised after the last of them.

    Args:
        model: ``model(input_ids)`` records its visits in the active sink.
        corpus: the tokens, on the host.
        settings: what to do.
        batch_size: documents per forward; None runs all at once.
        context: makes the context of each forward.
        before: (step, chosen experts) of an earlier probe of this corpus, for saturation.
        keep: False on ranks that write nothing: they run the forwards and reduce nothing.

    Raises:
        TraceError: the sink is armed.
        ProbeError: the model records no visit, or `before` is of other tokens.
    """
    run = _Run(model, settings, context, keep=keep)
    run.corpus(corpus, batch_size)
    return run.result(corpus, before)


def chosen_experts(
    model: nn.Module,
    corpus: EncodedCorpus,
    *,
    batch_size: int | None = None,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    keep: bool = True,
) -> Chosen:
    """What a deep probe of these parameters would hand to the next one, by its first forwards alone.

    After a restart it stands for the deep probe before it. Collective, arguments and errors as `run_deep_probe`.
    """
    run = _Run(model, DeepSettings(shuffle_scope="batch"), context, keep=keep, routing_only=True)
    run.corpus(corpus, batch_size)
    return run.chosen(corpus)


class _Run:
    def __init__(
        self,
        model: nn.Module,
        settings: DeepSettings,
        context: Callable[[], AbstractContextManager[object]],
        *,
        keep: bool,
        routing_only: bool = False,
    ) -> None:
        self.error: Exception | None = None
        self._model, self._settings, self._context, self._keep = model, settings, context, keep
        self._routing, self._readouts = RoutingRecorder(), Readouts()
        self._perturbations = Perturbations(settings.num_directions, settings.seed)
        self._clean, self._passes = CleanVisits(), Passes()
        self._read = None if routing_only else getattr(model, "loop_readout", None)
        entry = None if routing_only else getattr(model, "loop_entry", None)
        self._entry: nn.Module | None = None if entry is None else entry()
        self._perturbs = self._entry is not None and settings.num_directions > 0

    def corpus(self, corpus: EncodedCorpus, batch_size: int | None) -> None:
        """All forwards over all documents; what failed in loopscope's own code is raised after the last."""
        if ACTIVE_TRACE_SINK.armed:
            raise TraceError(
                "a deep probe ran while the trace sink is armed; expected it between training steps"
            )
        ids = torch.from_numpy(corpus.input_ids.copy()).to(next(self._model.parameters()).device)
        with isolated_forward(self._model):
            for chunk in torch.split(ids, batch_size or len(ids)):
                self.documents(chunk)
        if self.error is not None:
            raise self.error

    def documents(self, ids: Tensor) -> None:
        """All forwards over some documents."""
        try:
            if not self._forward(ids, self._record_clean):
                raise ProbeError(
                    f"{type(self._model).__name__} recorded no visit; expected one TracePoint per visit, in eval "
                    "mode too"
                )
            self._read_out(ids)
            if self._perturbs:
                self._perturb(ids)
            self._routing.set_depth(len(self._passes))
            self._perturbations.set_depth(len(self._passes))
        finally:
            self._clean.clear()
            self._passes.clear()

    def result(self, corpus: EncodedCorpus, before: tuple[int, Chosen] | None) -> DeepResult:
        """Rows of everything that was kept."""
        if not self._keep:
            return DeepResult(tables={}, skipped=(), chosen={})
        settings = self._settings
        tables: Tables = {
            "probe_readout": self._readouts.rows(settings.readout),
            "probe_margin": margin_rows(
                self._routing,
                scope=settings.shuffle_scope,
                num_shuffles=settings.num_shuffles,
                seed=settings.seed,
            ),
            "probe_perturbation": self._perturbations.rows(),
            "probe_specialisation": specialisation_rows(
                self._routing,
                corpus.input_ids,
                list(corpus.strata.get("domain", ["all"] * len(corpus.input_ids))),
                seed=settings.seed,
            ),
        }
        if before is not None:
            _check_tokens(before[1], corpus.corpus_hash)
            tables["probe_saturation"] = saturation_rows(self._routing, before[1], before[0])
        columns = {
            "corpus_name": corpus.name,
            "corpus_hash": corpus.corpus_hash,
            "first_token_dropped": corpus.dropped_first_token,
        }
        return DeepResult(
            tables={name: [{**row, **columns} for row in rows] for name, rows in tables.items()},
            skipped=tuple(self._skipped()),
            chosen=self.chosen(corpus),
        )

    def chosen(self, corpus: EncodedCorpus) -> Chosen:
        """What every visit chose; nothing where nothing is kept."""
        return self._routing.chosen(corpus.corpus_hash) if self._keep else {}

    def _skipped(self) -> list[str]:
        name, refused = type(self._model).__name__, self._perturbations.refused
        return [
            *([f"readout: {name} has no loop_readout(h, readout=...)"] if self._read is None else []),
            *([f"perturbation: {name} has no loop_entry()"] if self._entry is None else []),
            *([] if refused is None else [f"perturbation: {refused}"]),
        ]

    def _forward(self, ids: Tensor, record: Callable[[TracePoint], None]) -> int:
        """One forward whose visits are reduced as they happen; how many there were."""
        window = StreamingWindow(record)
        ACTIVE_TRACE_SINK.arm(window)
        try:
            with model_forward(self._context):
                self._model(ids)
        finally:
            ACTIVE_TRACE_SINK.disarm()
        return window.visits

    def _record_clean(self, point: TracePoint) -> None:
        # First, and without anything that can fail: how many readouts follow must be the same on every rank.
        self._passes.note(point)
        self._guarded(lambda: self._routing.add(point))
        if self._read is not None or self._perturbs:
            self._guarded(lambda: self._clean.add(point))

    def _read_out(self, ids: Tensor) -> None:
        if self._read is None:
            return
        for loop_step, position in enumerate(self._passes.last_positions()):
            state = self._state(position)
            with model_forward(self._context):
                logits = self._read(state, readout=self._settings.readout)
            self._guarded(partial(self._readouts.add, loop_step, logits, ids))
        self._guarded(self._readouts.end_documents)

    def _state(self, position: int) -> Tensor:
        """The state after a visit. A rank that keeps nothing, or no longer, gives one of its shape."""
        found = [self._passes.any_state()]
        self._guarded(lambda: found.append(self._clean.residual(position)))
        return found[-1]

    def _perturb(self, ids: Tensor) -> None:
        assert self._entry is not None
        reduced, clean = self._perturbations, self._clean
        self._forward(ids, lambda point: self._guarded(lambda: reduced.add_clean(clean, point)))
        self._guarded(lambda: reduced.end_forward(clean))
        for direction, injection in enumerate(reduced.injections):
            add = partial(reduced.add, direction, clean)
            with injection.into(self._entry):
                self._forward(ids, lambda point, add=add: self._guarded(lambda: add(point)))  # type: ignore[misc]
            self._guarded(lambda: reduced.end_forward(clean))

    def _guarded(self, reduce: Callable[[], None]) -> None:
        """Loopscope's own part of a forward: what it raises waits for the forwards that other ranks share."""
        if not self._keep or self.error is not None:
            return
        try:
            reduce()
        except Exception as error:  # noqa: BLE001 - raised by run_deep_probe, after the last forward
            self.error = error.with_traceback(None)


def _check_tokens(before: Chosen, corpus_hash: str) -> None:
    if (other := getattr(before, "corpus_hash", corpus_hash)) != corpus_hash:
        raise ProbeError(
            f"saturation over different tokens cannot be measured: corpus_hash {other} before, {corpus_hash} now; "
            "expected one and the same. Leave `before` out, or probe the same corpus."
        )


class Passes:
    """Which visit ends each pass through the loop; of the states it keeps the newest."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}
        self._state: Tensor | None = None

    def __len__(self) -> int:
        return len(self._last)

    def note(self, point: TracePoint) -> None:
        """A visit of the clean forward."""
        if point.block != "loop":
            return
        self._state = point.residual
        if point.layer_idx >= self._last.get(point.loop_step, (-1,))[0]:
            self._last[point.loop_step] = (point.layer_idx, point.unrolled_pos)

    def last_positions(self) -> list[int]:
        """The visit of the last layer of every loop step, in order."""
        return [position for _, (_, position) in sorted(self._last.items())]

    def any_state(self) -> Tensor:
        """A state of the loop, of the shape and type that all have."""
        assert self._state is not None
        return self._state

    def clear(self) -> None:
        """Other documents follow."""
        self._last.clear()
        self._state = None
