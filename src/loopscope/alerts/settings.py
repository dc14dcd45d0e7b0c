"""By which bounds a stored run is judged: its own from run.json, or what its reader says."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from loopscope.catalog.alert_settings import AlertSettings
from loopscope.errors import ConfigError


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
