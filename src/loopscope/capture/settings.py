"""The settings of a run that a backend may or may not honour, with a note of those that were set."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from loopscope.alerts import AlertConfig

_ALERTS = AlertConfig()


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is asked for, and how its trainer runs the model."""

    fields_set: ClassVar[frozenset[str]]
    """Names that were passed; each instance has its own."""

    trace_every: int = 10
    """Trace every N steps."""
    num_microbatches: int = 1
    """Forwards of one optimizer step."""
    probe_every: int = 0
    """Probe every M steps."""
    per_rank: bool = False
    """Rank-local rows beside global ones."""
    resume: bool = False
    """Continue the run in `out`."""
    verify: bool = True
    """Reconcile every traced choice with its captured scores."""
    require: tuple[str, ...] = ()
    """Metrics that must be there."""
    trackers: tuple[str, ...] = ()
    """Trackers of headline scalars, tables of visits and alerts."""
    alerts: AlertConfig = _ALERTS
    """Bounds of the alert rules, and where alerts go."""
    compile: bool = False
    """The model, or its blocks, run compiled."""
    recompute: bool = False
    """Activation checkpointing."""
    data_parallel: bool = False
    """Each rank has the whole model, or shards of parameters, and its own tokens."""
    pipeline_parallel: bool = False
    """The model's layers are split over stages."""
    tensor_parallel: bool = False
    """Layers are split over ranks."""
    context_parallel: bool = False
    """Sequences are split over ranks."""
    expert_parallel: bool = False
    """Experts are split over ranks."""
    full_dtensor: bool = False
    """Activations are DTensors of the global batch."""
    cuda_graphs: bool = False
    """Forwards are replayed from CUDA graphs."""
    loss_rows: bool = False
    """Write the `loss` table."""
    grad_norm: bool = False
    """Fill `loss.grad_norm`."""

    def __new__(cls, **given: Any) -> Self:
        """Note which names are passed."""
        self = super().__new__(cls)
        object.__setattr__(self, "fields_set", frozenset(given))
        return self

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every field."""
        return tuple(item.name for item in fields(cls))

    def asks_for(self, name: str) -> bool:
        """True where the field was set to something else than its default."""
        return name in self.fields_set and getattr(self, name) != getattr(type(self), name)
