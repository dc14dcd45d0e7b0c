"""What loopscope adds to torchtitan's configuration, under ``--loopscope.*``."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from loopscope.alerts import AlertConfig
from loopscope.errors import ConfigError
from loopscope.session import LoopscopeConfig


@dataclass(kw_only=True, slots=True)
class LoopscopeOptions:
    """The fields of `Loopscope.Config` that apply to a torchtitan run, and the probe's."""

    out: str = ""
    """Folder of the run; required. torchtitan's dump folder is `torchtitan` inside it."""
    run_name: str = ""
    """Name for people; empty means the folder's name."""
    trace_every: int = 10
    """Trace every N steps; also steps 1-10, powers of two up to 512 and the last step. 0 turns tracing off."""
    probe_every: int = 500
    """Probe every M steps; also step 0 and the last step. 0 turns probing off."""
    per_rank: bool = False
    """Write rank-local rows beside the global ones."""
    on_error: Literal["record", "raise"] = "record"
    """"record": errors of loopscope are counted and training goes on; "raise": they stop it."""
    compile_reductions: bool = False
    """Compile the reductions for this run's shapes before its first step: seconds per shape, repaid in long runs."""
    trackers: tuple[str, ...] = ()
    """Further trackers, which other packages registered. W&B and TensorBoard follow torchtitan's own settings:
    --metrics.enable-wandb, --metrics.enable-tensorboard."""
    mirror: str = ""
    """Keep a copy of everything sealed at this URL (s3://bucket/runs/one) or absolute path."""
    preempted_by: tuple[str, ...] = ()
    """What the scheduler sends, makes or sets before it takes the machine away: SIGUSR1, file:PATH or env:NAME."""
    system_every_s: float = 10.0
    """Seconds between two samples of the machine's own figures; 0 turns them off."""
    resume: bool = False
    """Continue the run in `out` from its latest checkpoint, as a new attempt."""
    probe_deep_every: int = 0
    """Also run the deep probe (readouts, margins against a null, perturbation, specialisation, saturation) every
    so many steps, at step 0 and at the last, wherever a probe runs. 0 turns it off: it costs many forwards."""
    probe_shuffle_scope: Literal["", "batch", "document"] = ""
    """Where the deep probe's null permutes a column of scores; needed with it, and without a default."""
    probe_corpus: str = "core"
    """Name of a corpus that comes with loopscope, or the path of one."""
    probe_seq_len: int = 128
    """Tokens per probe document at most; never more than the training sequence length."""
    probe_batch_size: int = 8
    """Documents per probe forward."""
    alerts: AlertConfig = field(default_factory=AlertConfig)
    """The alert rules' bounds, and where alerts are sent besides the log and the health table."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, without secrets: torchtitan logs this, and hands it to trackers."""
        return {**asdict(self), "alerts": self.alerts.as_plain()}

    def to_config(self, trackers: tuple[str, ...] = ()) -> LoopscopeConfig:
        """The checked configuration of the run.

        Args:
            trackers: names of the trackers, those of torchtitan's own settings included.

        Raises:
            ConfigError: a value is wrong; the message names it.
        """
        if not self.out:
            raise ConfigError("--loopscope.out is not set, expected the path of a folder for this run")
        for name, least in (("probe_seq_len", 2), ("probe_batch_size", 1), ("probe_deep_every", 0)):
            if getattr(self, name) < least:
                flag = "--loopscope." + name.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, name)}, expected >= {least}")
        if self.probe_deep_every and not self.probe_shuffle_scope:
            raise ConfigError(
                "--loopscope.probe-deep-every is set, but --loopscope.probe-shuffle-scope is not; expected batch or "
                "document. A null over all tokens and one within documents answer different questions."
            )
        return LoopscopeConfig(
            out=self.out,  # type: ignore[arg-type]  # converted there
            run_name=self.run_name,
            trace_every=self.trace_every,
            probe_every=self.probe_every,
            per_rank=self.per_rank,
            on_error=self.on_error,
            resume=self.resume,
            mirror=self.mirror,
            preempted_by=self.preempted_by,
            system_every_s=self.system_every_s,
            trackers=trackers,
            alerts=self.alerts,
        )
