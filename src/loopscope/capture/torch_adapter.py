"""Any torch model: its own trace contract where it has one, else the user's capture plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from loopscope.capture.adapter import Remark
from loopscope.capture.capabilities import BackendSupport
from loopscope.capture.errors import PlanError
from loopscope.capture.requirements import Placement, Requirement
from loopscope.capture.spec import CapturePlan
from loopscope.capture.torch_base import TorchModelAdapter
from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta, TracePoint, TraceSink, VisitSpec


class TorchAdapter(TorchModelAdapter):
    """A plain torch model. One that has ``expected_visits()`` and ``trace_meta()`` records itself, without hooks."""

    def derive(self) -> CapturePlan:
        """Empty: the user's plan says what the modules are."""
        return CapturePlan({})

    @property
    def has_contract(self) -> bool:
        """True where the model records its own visits."""
        return all(callable(getattr(self.model, name, None)) for name in ("expected_visits", "trace_meta"))

    def check_plan(self) -> None:
        """A model with the contract needs no plan, and takes none."""
        if not self.has_contract:
            super().check_plan()
        elif len(self.plan):
            raise PlanError(
                f"{type(self.model).__name__} records its own visits (expected_visits, trace_meta); a capture plan "
                "would record them twice. Leave `plan` out."
            )

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """The model's own promise, or the plan's."""
        promised: Any = self.model.expected_visits if self.has_contract else super().expected_visits
        return tuple(promised())

    def backend_support(self) -> BackendSupport:
        """A model with the contract hands over every tensor itself."""
        return ContractSupport() if self.has_contract else super().backend_support()

    def listening(self) -> AbstractContextManager[Any]:
        """See `Adapter`."""
        return self._armed() if self.has_contract else super().listening()

    @contextmanager
    def _armed(self) -> Iterator[SinkRecording]:
        recording = SinkRecording(self.model)
        ACTIVE_TRACE_SINK.arm()
        try:
            yield recording
        finally:
            recording.sink = ACTIVE_TRACE_SINK.disarm() or {}


class SinkRecording:
    """One forward of a model that records itself."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.sink: TraceSink = {}

    def points(self, *, verify: bool = True) -> list[TracePoint]:
        """What the model recorded; the metrics check it."""
        return list(self.sink.values())

    def meta(self) -> TraceMeta:
        """The model's own."""
        return cast(TraceMeta, self._model.trace_meta())

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model knows what it was given."""

    def remarks(self) -> list[Remark]:
        """Coverage tells: the model promises its visits itself."""
        return []

    def blocks(self) -> list[str]:
        """A model that records itself names no modules."""
        return [""] * len(self.sink)

    def clear(self) -> None:
        """Let go of every tensor."""
        self.sink.clear()


class ContractSupport:
    """Answers for a model that fulfils the trace contract: every tensor, nothing of the objective."""

    def facts(self) -> Mapping[str, str]:
        """Nothing is read from the model but its contract."""
        return {"visits": "the model's own expected_visits()"}

    def supports_direct(self, req: Requirement) -> bool:
        """See `BackendSupport`."""
        return req.tensor in (
            "router_logits", "router_probs", "topk_idx", "topk_weights", "residual", "before_residual", "choice_scores"
        )  # fmt: skip

    def supports_transform(self, req: Requirement) -> bool:
        """Nothing needs one."""
        return False

    def supports_state(self, component: str, dtype: str, placement: Placement) -> bool:
        """A residual is kept for the length of one forward."""
        return component == "previous_residual" and placement == "local"

    def why_absent(self, req: Requirement) -> str:
        """See `BackendSupport`."""
        return f"the trace contract does not promise {req.tensor}"
