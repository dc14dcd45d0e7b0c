"""The numbers of the alert rules, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from loopscope.errors import ConfigError

_COUNTS = {"warmup_steps": 0, "sustain": 1, "again_after": 1}
"""Integer settings → smallest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleBounds:
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
    """MaxVio, as a share of its maximum E/k − 1."""
    maxvio_critical: float = 0.6
    """The same, critical."""
    maxvio_noise: float = 3.0
    """MaxVio, in units of sqrt(2 ln E · E/(kT)): what balanced routing of T tokens shows by chance."""
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

    def __post_init__(self) -> None:
        for field in fields(RuleBounds):
            value, least = getattr(self, field.name), _COUNTS.get(field.name)
            if least is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ConfigError(f"{field.name} is {value!r}, expected an integer >= {least}")
            elif (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
            ):
                raise ConfigError(f"{field.name} is {value!r}, expected a number above 0")
        if self.clear_at > 1:
            raise ConfigError(f"clear_at is {self.clear_at!r}, expected a share of the bound in (0, 1]")
