"""Settings of a store that have sensible defaults; tests and benchmarks change them."""

from dataclasses import dataclass
from typing import Literal

from loopscope.errors import ConfigError
from loopscope.store.locks import GRACE_S
from loopscope.store.preemption import check_preempted_by


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a run directory is written."""

    on_error: Literal["record", "raise"] = "record"
    """"record": no error of a row or a disk leaves the store, everything dropped is counted. "raise": it does."""
    fsync_s: float = 5.0
    """Seconds after which a row has reached the disk itself."""
    rotate_bytes: int = 64 << 20
    """Size at which a journal is sealed; in Parquet it is several times smaller."""
    rotate_s: float = 3600.0
    """Age at which a journal is sealed."""
    tick_s: float = 1.0
    """Seconds between two looks of the background thread."""
    seal_in: Literal["process", "thread"] = "process"
    """Where journals are sealed while training goes on."""
    retry_s: float = 30.0
    """Seconds until a failed sealing or upload is tried again."""
    grace_s: float = GRACE_S
    """How long a lock holder on another machine is watched before it is taken for dead."""
    preempted_by: tuple[str, ...] = ()
    """What the scheduler sends, makes or sets before it takes the machine away: "SIGUSR1", "file:PATH", "env:NAME"."""

    def __post_init__(self) -> None:
        if self.on_error not in ("record", "raise"):
            raise ConfigError(f"on_error is {self.on_error!r}, expected 'record' or 'raise'")
        if self.seal_in not in ("process", "thread"):
            raise ConfigError(f"seal_in is {self.seal_in!r}, expected 'process' or 'thread'")
        object.__setattr__(self, "preempted_by", check_preempted_by(self.preempted_by))
        for name in ("fsync_s", "rotate_bytes", "rotate_s", "tick_s", "retry_s", "grace_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected > 0")
