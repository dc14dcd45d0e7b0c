"""A forward over a fixed corpus that leaves training as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from loopscope.errors import ProbeError, TraceError
from loopscope.trace.collector import LoopTraceCollector
from loopscope.trace.isolation import isolated_forward
from loopscope.trace.point import TraceMeta
from loopscope.trace.probe_join import join_windows
from loopscope.trace.probe_loss import check_ids, check_logits, logits_of, per_token_loss, vocabulary_sizes
from loopscope.trace.sink import ACTIVE_TRACE_SINK, StreamingWindow, TraceWindow

if TYPE_CHECKING:
    from jaxtyping import Int

_PHASE = "_loopscope_probe_forward"


def run_probe_forward(
    model: nn.Module,
    input_ids: Int[Tensor, "B S"],
    *,
    collector: LoopTraceCollector,
    step: int,
    meta: TraceMeta | None = None,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Run the corpus through `model` and hand its trace to ``collector.on_probe_step``, once.

    Eval mode, no gradients, no compilation. Afterwards, also when something raises, everything is as before:
    random streams (Python, NumPy, torch CPU, every accelerator, DTensor's tracker, generators that a module
    holds), `training` of every submodule, buffers, `_skip_lm_head`; the sink is disarmed and emptied. The
    training dataloader is never touched.

    The loss is cross-entropy in nats with an explicit shift, in float32; position S-1 has no target and is 0.

    Under FSDP2 every rank calls this, with the same number of forwards. What fails in loopscope's own
    code, the collector included, is raised only after the last forward and its collectives, so that no
    rank waits for one that gave up. What fails in the model's forward is raised at once
    (`raised_in_probe_forward` tells them apart): on more than one rank the others are already waiting, and
    the job must end.

    Args:
        model: ``model(input_ids)`` returns logits [B, S, V], or a tuple that starts with them. Wrap a model
            that needs more arguments.
        input_ids: integer token ids [B, S], on the model's device.
        collector: gets ``on_probe_step(step, sink, meta, per_token_loss)`` once per probe. One that has a
            method ``probe_window() -> StreamingWindow`` gets each visit as it happens, and the window, empty,
            as the sink: the memory of a probe then does not grow with the number of visits.
        step: the optimizer step whose parameters are probed (0: the initial ones).
        meta: default is the model's own ``trace_meta()``, asked after the forward.
        context: makes the context that each forward runs in, such as the trainer's own.
        batch_size: documents per forward; None runs all at once. With several forwards the points of a
            visit are joined along B (copies, one visit after the other), so that the collector still gets
            one point per visit: this bounds the activations of the forward, not the size of the trace.

    Returns:
        What ``on_probe_step`` returned: headline scalars.

    Raises:
        TraceError: the sink is armed (a probe inside a traced forward); it stays as it was.
        ProbeError: `input_ids` do not fit, the output is no logits, no visit was recorded, or there is no
        meta.
    """
    if ACTIVE_TRACE_SINK.armed:
        raise TraceError(
            "run_probe_forward was called while the trace sink is armed; expected it disarmed. Probe between "
            "training steps, after ACTIVE_TRACE_SINK.disarm()."
        )
    vocabulary = vocabulary_sizes(model)
    check_ids(input_ids, vocabulary)
    if batch_size is not None and batch_size < 1:
        raise ProbeError(f"batch_size is {batch_size}, expected >= 1, or None for all documents at once")
    if meta is None and not callable(getattr(model, "trace_meta", None)):
        raise ProbeError(
            f"{type(model).__name__} has no trace_meta() and no meta was given; expected one of them. Pass "
            "meta=TraceMeta(...), or give the model the method trace_meta() -> TraceMeta."
        )
    open_window = getattr(collector, "probe_window", None)
    seen = _Seen(vocabulary=vocabulary, stream=None if open_window is None else open_window())
    try:
        with isolated_forward(model):
            for ids in torch.split(input_ids, batch_size or input_ids.shape[0]):
                _run_chunk(model, ids, context, seen)
            return _hand_over(model, collector, step, meta, seen)
    finally:
        ACTIVE_TRACE_SINK.disarm()
        seen.clear()


def raised_in_probe_forward(error: BaseException) -> bool:
    """True where `error` left the model's own forward during a probe, rather than loopscope's code.

    With more than one rank such an error must end the job: the other ranks wait in a collective.
    """
    return getattr(error, _PHASE, False)


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What the forwards of one probe left so far."""

    vocabulary: frozenset[int]
    stream: StreamingWindow | None
    """What takes the visits of all forwards; None where each forward has a window of its own."""
    windows: list[TraceWindow] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    error: Exception | None = None
    """The first failure of loopscope's own code, kept until all forwards are done."""

    def clear(self) -> None:
        for window in self.windows:
            window.clear()
        self.windows.clear()
        self.losses.clear()
        self.error = None


def _run_chunk(
    model: nn.Module, ids: Tensor, context: Callable[[], AbstractContextManager[object]], seen: _Seen
) -> None:
    if seen.error is None:  # after a failure the remaining forwards run for their collectives only
        if seen.stream is not None:
            seen.stream.begin_forward()
        ACTIVE_TRACE_SINK.arm(seen.stream)
    try:
        with model_forward(context):
            logits = logits_of(model(ids))
    finally:
        window = ACTIVE_TRACE_SINK.disarm()
    if window is None or seen.error is not None:
        return
    try:
        if seen.stream is not None and seen.stream.error is not None:
            raise seen.stream.error
        shown = next((point.residual.shape[-1] for point in window.values()), None)
        width = window.width if isinstance(window, StreamingWindow) else shown
        check_logits(logits, ids, seen.vocabulary, width)
        seen.losses.append(per_token_loss(logits, ids))
        if seen.stream is None:
            seen.windows.append(window)
    except Exception as error:  # noqa: BLE001 - raised by _hand_over, once no rank can wait for this one
        window.clear()
        seen.error = error


@contextmanager
def model_forward(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Around a forward of the model during a probe, in the trainer's own `context`: what it raises is marked as its
    own, for `raised_in_probe_forward`."""
    try:
        with context():
            yield
    except ProbeError:
        raise  # An output that is no logits is found on every rank alike, after the collectives: no rank waits.
    except Exception as error:
        error.add_note("raised in the model's own forward, during a loopscope probe")
        setattr(error, _PHASE, True)
        raise


def _hand_over(
    model: nn.Module, collector: LoopTraceCollector, step: int, meta: TraceMeta | None, seen: _Seen
) -> dict[str, float]:
    if seen.error is not None:
        raise seen.error
    sink = join_windows(seen.windows) if seen.stream is None else seen.stream
    try:
        if not sink and not getattr(sink, "visits", 0):
            raise ProbeError(
                f"{type(model).__name__} recorded no visit; expected one TracePoint per visit. Its outer "
                "loop must call ACTIVE_TRACE_SINK.record(TracePoint(...)) after each block, in eval mode "
                "too."
            )
        if meta is None:
            meta = model.trace_meta()  # type: ignore[operator]  # nn.Module types every attribute as a tensor
        meta.check()
        return collector.on_probe_step(step, sink, meta, torch.cat(seen.losses))
    finally:
        sink.clear()
