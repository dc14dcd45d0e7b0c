"""The bounds of the alert rules, checked when they are made; a run keeps its own in run.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from loopscope.alerts.names import check_names
from loopscope.errors import ConfigError

_COUNTS = {"warmup_steps": 0, "sustain": 1, "again_after": 1}
"""Integer settings → smallest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertSettings:
    """Bounds of the rules. The defaults do not depend on the model's size and lie above sampling noise."""

    warmup_steps: int = 1000
    """Steps at the start that are not judged: a router needs them to settle. Arithmetic (closure) and lost
    data (coverage, non-finite values, dropped rows) are judged from the first step on."""
    sustain: int = 20
    """Traces in a row that must break a bound before it is an alert."""
    clear_at: float = 0.8
    """An alert ends where the value is back at this share of its bound."""
    again_after: int = 1000
    """An event that is told at once is told again where none like it came for this many steps."""
    maxvio_share: float = 0.3
    """maxvio_count, as a share of its maximum E/k − 1."""
    maxvio_critical: float = 0.6
    """The same, critical."""
    maxvio_noise: float = 3.0
    """maxvio_count, in units of sqrt(2 ln E · E/(kT)): what balanced routing of T tokens shows by chance."""
    dead_expected: float = 100.0
    """Assignments that a dead expert should have had over the window: chance e^-100."""
    load_entropy: float = 0.8
    """load_entropy_ratio."""
    load_entropy_critical: float = 0.5
    """The same, critical."""
    collapse: float = 0.05
    """token_entropy_ratio, and mutual_information in units of ln E."""
    z_above: float = 10.0
    """|z_mean| above ln E: bfloat16 steps by 0.25 at 50."""
    logit_abs_max: float = 50.0
    """Largest router logit."""
    closure: float = 1e-4
    """|closure_error| in units of max(1, |total_loss|)."""
    token_correlation: float = 0.9
    """token_correlation at the last loop visit."""
    growth: float = 1.1
    """Growth at the last step_boundary."""
    relative_delta: float = 1.5
    """relative_delta there, in units of its best mean over `sustain` traces."""
    off: tuple[str, ...] = ()
    """Names of rules that do not judge."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "off", _names(self.off))
        check_names(self.off, "off")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "off":
                continue
            least = _COUNTS.get(field.name)
            if least is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ConfigError(f"{field.name} is {value!r}, expected an integer >= {least}")
            elif (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
            ):
                raise ConfigError(f"{field.name} is {value!r}, expected a number above 0")
        if self.clear_at > 1:
            raise ConfigError(f"clear_at is {self.clear_at!r}, expected a share of the bound in (0, 1]")

    def as_plain(self) -> dict[str, object]:
        """Plain types, for run.json."""
        return {**asdict(self), "off": list(self.off)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertOverrides:
    """What whoever reads a run judges otherwise than the run itself did; None leaves the run's own."""

    warmup_steps: int | None = None
    """As `AlertSettings.warmup_steps`."""
    sustain: int | None = None
    """As `AlertSettings.sustain`."""

    def __post_init__(self) -> None:
        self.on(AlertSettings())  # a wrong value is refused here, not at the first run

    def on(self, settings: AlertSettings) -> AlertSettings:
        """The run's settings with these in place."""
        return replace(settings, **{name: value for name, value in asdict(self).items() if value is not None})


Bounds = AlertSettings | AlertOverrides | None
"""How a run is to be judged: by these bounds, by its own with some replaced, or by its own (None)."""


def settings_for(configuration: Mapping[str, Any], bounds: Bounds = None) -> AlertSettings:
    """The bounds that a run is judged by.

    Args:
        configuration: of its manifest. What is not there, as in runs of older versions, is the default; so is what
            this version does not know or would refuse, for run.json may come from anywhere.
        bounds: instead of the run's own.
    """
    if isinstance(bounds, AlertSettings):
        return bounds
    settings = _stored(configuration)
    return settings if bounds is None else bounds.on(settings)


def _stored(configuration: Mapping[str, Any]) -> AlertSettings:
    found: Any = configuration
    for key in ("loopscope", "alerts", "rules"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return AlertSettings()
    known: dict[str, Any] = {}
    for field in fields(AlertSettings):
        if field.name not in found:
            continue
        try:
            replace(AlertSettings(), **{field.name: found[field.name]})
        except (ConfigError, TypeError):
            continue
        known[field.name] = found[field.name]
    return AlertSettings(**known)


def _names(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, tuple | list):
        raise ConfigError(f"off is {given!r}, expected names of rules, such as ('maxvio',)")
    return tuple(given)
