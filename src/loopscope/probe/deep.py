"""The deep probe: what is too dear for every probe, over the same corpus, with a period of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from loopscope.errors import ConfigError, ProbeError, TraceError
from loopscope.probe.deep_perturbation import Perturbations
from loopscope.probe.deep_readout import Readouts
from loopscope.probe.deep_routing import Chosen, Routing, Tables
from loopscope.probe.deep_rows import margin_rows, saturation_rows, specialisation_rows
from loopscope.probe.encode import EncodedCorpus
from loopscope.trace import ACTIVE_TRACE_SINK, TraceWindow
from loopscope.trace.isolation import isolated_forward
from loopscope.trace.probe import mark_probe_forward

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
        if self.shuffle_scope not in ("batch", "document"):
            raise ConfigError(f"shuffle_scope is {self.shuffle_scope!r}, expected 'batch' or 'document'")
        if self.readout not in ("tail", "head"):
            raise ConfigError(f"readout is {self.readout!r}, expected 'tail' or 'head'")
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
        ProbeError: the model records no visit.
    """
    if ACTIVE_TRACE_SINK.armed:
        raise TraceError("a deep probe ran while the trace sink is armed; expected it between training steps")
    run = _Run(model, settings, context, keep=keep)
    ids = torch.from_numpy(corpus.input_ids.copy()).to(next(model.parameters()).device)
    with isolated_forward(model):
        for chunk in torch.split(ids, batch_size or len(ids)):
            run.documents(chunk)
    if run.error is not None:
        raise run.error
    return run.result(corpus, before)


class _Run:
    def __init__(
        self,
        model: nn.Module,
        settings: DeepSettings,
        context: Callable[[], AbstractContextManager[object]],
        *,
        keep: bool,
    ) -> None:
        self.error: Exception | None = None
        self._model, self._settings, self._context, self._keep = model, settings, context, keep
        self._routing = Routing(with_scores=True)
        self._readouts = Readouts()
        self._perturbations = Perturbations(settings.num_directions, settings.seed)
        self._read = getattr(model, "loop_readout", None)
        entry = getattr(model, "loop_entry", None)
        self._entry: nn.Module | None = None if entry is None else entry()

    def documents(self, ids: Tensor) -> None:
        """All forwards over some documents."""
        clean = self._forward(ids)
        try:
            if not clean:
                raise ProbeError(
                    f"{type(self._model).__name__} recorded no visit; expected one TracePoint per visit, in eval "
                    "mode too"
                )
            states = _loop_outputs(clean)
            self._own(lambda: self._routing.add(clean, len(states)))
            self._read_out(states, ids)
            if self._entry is not None and self._settings.num_directions:
                self._disturb(clean, ids, len(states))
        finally:
            clean.clear()

    def result(self, corpus: EncodedCorpus, before: tuple[int, Chosen] | None) -> DeepResult:
        """Rows of everything that was kept."""
        if not self._keep:
            return DeepResult(tables={}, skipped=(), chosen={})
        settings = self._settings
        domains = list(corpus.strata.get("domain", ["all"] * len(corpus.input_ids)))
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
                self._routing, corpus.input_ids, domains, seed=settings.seed
            ),
        }
        if before is not None:
            tables["probe_saturation"] = saturation_rows(self._routing, before[1], before[0])
        columns = {
            "corpus_name": corpus.name,
            "corpus_hash": corpus.corpus_hash,
            "first_token_dropped": corpus.dropped_first_token,
        }
        return DeepResult(
            tables={name: [{**row, **columns} for row in rows] for name, rows in tables.items()},
            skipped=tuple(self._skipped()),
            chosen=self._routing.chosen(),
        )

    def _skipped(self) -> list[str]:
        name = type(self._model).__name__
        found = []
        if self._read is None:
            found.append(f"readout: {name} has no loop_readout(h, readout=...)")
        if self._entry is None:
            found.append(f"perturbation: {name} has no loop_entry()")
        if self._perturbations.refused is not None:
            found.append(f"perturbation: {self._perturbations.refused}")
        return found

    def _forward(self, ids: Tensor) -> TraceWindow:
        window = ACTIVE_TRACE_SINK.arm()
        try:
            with self._context():
                self._model(ids)
        except BaseException as error:
            window.clear()
            if isinstance(error, Exception):
                mark_probe_forward(error)
            raise
        finally:
            ACTIVE_TRACE_SINK.disarm()
        return window

    def _read_out(self, states: list[Tensor], ids: Tensor) -> None:
        if self._read is None:
            return
        for loop_step, state in enumerate(states):
            try:
                with self._context():
                    logits = self._read(state, readout=self._settings.readout)
            except Exception as error:
                mark_probe_forward(error)
                raise
            self._own(partial(self._readouts.add, loop_step, logits, ids))
        self._readouts.end_documents()

    def _disturb(self, clean: TraceWindow, ids: Tensor, num_loop_steps: int) -> None:
        assert self._entry is not None
        again = self._forward(ids)
        self._own(lambda: self._perturbations.add_clean(clean, again, num_loop_steps))
        again.clear()
        for direction, injection in enumerate(self._perturbations.injections):
            with injection.into(self._entry):
                disturbed = self._forward(ids)
            self._own(partial(self._perturbations.add, direction, clean, disturbed))
            disturbed.clear()

    def _own(self, reduce: Callable[[], None]) -> None:
        """Loopscope's own part of a forward: what it raises waits for the forwards that other ranks share."""
        if not self._keep or self.error is not None:
            return
        try:
            reduce()
        except Exception as error:  # noqa: BLE001 - raised by run_deep_probe, after the last forward
            self.error = error.with_traceback(None)


def _loop_outputs(window: TraceWindow) -> list[Tensor]:
    """The output of the last layer of every loop step, in order."""
    last: dict[int, tuple[int, Tensor]] = {}
    for point in window.values():
        if point.block == "loop" and point.layer_idx >= last.get(point.loop_step, (-1,))[0]:
            last[point.loop_step] = (point.layer_idx, point.residual)
    return [residual for _, (_, residual) in sorted(last.items())]
