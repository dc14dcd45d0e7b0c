"""The configuration of a run, checked when it is made."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from loopscope.alerts import AlertConfig
from loopscope.errors import ConfigError
from loopscope.store.mirror.remote import check_mirror
from loopscope.store.preemption import check_preempted_by
from loopscope.trackers import check_trackers

OnError = Literal["record", "raise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopscopeConfig:
    """What loopscope does in a run. Public name: `Loopscope.Config`."""

    out: Path
    """Folder of the run. No default: nothing is written to a folder that was not named."""
    run_name: str = ""
    """Name for people; empty means the folder's name. The identity is `run_id`, made by loopscope."""
    trace_every: int = 10
    """Trace every N steps; also steps 1–10, powers of two up to 512, and the last. 0 turns tracing off."""
    probe_every: int = 500
    """Run the probe every M steps; also step 0 and the last. 0 turns probing off."""
    per_rank: bool = False
    """Every rank writes rank-local rows beside the global ones; their lists are the counts only."""
    on_error: OnError = "record"
    """"record": no exception of loopscope reaches the training loop, it is counted; "raise": it does."""
    resume: bool = False
    """Continue the run in `out`, as a new attempt. Without it `out` must not hold a run."""
    trackers: tuple[str, ...] = ()
    """Trackers that get headline scalars, tables of visits and alerts: "wandb", "tensorboard", or what another
    package registered. One that fails is a health row, and costs neither a row nor the training."""
    mirror: str = ""
    """Where a copy of everything sealed is kept: a URL such as ``s3://bucket/runs/one``, or an absolute path. An upload
    that fails is a health row and is tried again. Empty: nowhere."""
    preempted_by: tuple[str, ...] = ()
    """What the scheduler sends, makes or sets before it takes the machine away: "SIGUSR1", "file:PATH", "env:NAME" (a
    variable that the training itself sets). A run that ends so is "preempted", unless a rank recorded an error."""
    system_every_s: float = 10.0
    """Seconds between two samples of the machine's own figures (table `system`, extra `system`); 0 turns them off."""
    alerts: AlertConfig = field(default_factory=AlertConfig)
    """The alert rules' bounds, and where alerts are sent besides the log and the health table."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        if not str(self.out).strip() or str(self.out) == ".":
            raise ConfigError(f"out is {str(self.out)!r}, expected the path of a folder for this run")
        for name, value in (("trace_every", self.trace_every), ("probe_every", self.probe_every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(
                    f"{name} is {value!r}, expected an integer >= 0: a number of steps, or 0 to turn it off"
                )
        if self.on_error not in get_args(OnError):
            raise ConfigError(
                f"on_error is {self.on_error!r}, expected 'record' (count errors, go on) or 'raise' (stop)"
            )
        if not isinstance(self.system_every_s, int | float) or not 0 <= self.system_every_s < float("inf"):
            raise ConfigError(
                f"system_every_s is {self.system_every_s!r}, expected seconds >= 0; 0 turns it off"
            )
        check_mirror(self.mirror)
        object.__setattr__(self, "preempted_by", check_preempted_by(self.preempted_by))
        object.__setattr__(self, "trackers", check_trackers(self.trackers))
        if not isinstance(self.alerts, AlertConfig):
            raise ConfigError(
                f"alerts is a {type(self.alerts).__name__}, expected AlertConfig(...), such as "
                "AlertConfig(rules=AlertSettings(sustain=10), webhook='env:HOOK')"
            )

    @property
    def name(self) -> str:
        """`run_name`, or the folder's name."""
        return self.run_name or self.out.resolve().name

    def as_plain(self) -> dict[str, object]:
        """Plain types for the manifest."""
        own = {
            "out": str(self.out),
            "trackers": list(self.trackers),
            "preempted_by": list(self.preempted_by),
            "alerts": self.alerts.as_plain(),
        }
        return asdict(self) | own
