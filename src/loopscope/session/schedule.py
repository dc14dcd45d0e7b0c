"""Which steps are traced and probed. Pure functions of the step, so that every rank decides alike."""

import math

PROBE_SHARE = 0.01
"""Probes may take this share of the time; beyond it their period is stretched."""
PROBE_GRACE_S = 600.0
"""Before this many seconds nothing is stretched: the share of a run's beginning says little about the run."""
FIRST_STEPS = 10
"""Steps 1 to this one are always traced: most wrong set-ups show there."""
LARGEST_POWER = 512
"""Powers of two up to this one are always traced: early training changes on a logarithmic scale."""


def is_trace_step(step: int, *, every: int, last_step: int | None = None) -> bool:
    """True where 1-based `step` is traced: every `every`, 1–10, powers of two up to 512, the last.

    Args:
        step: 1-based.
        every: N; 0 turns tracing off altogether.
        last_step: the last step of the run, where it is known.
    """
    if every == 0 or step < 1:
        return False
    power_of_two = step <= LARGEST_POWER and step & (step - 1) == 0
    return step % every == 0 or step <= FIRST_STEPS or power_of_two or step == last_step


def is_probe_step(step: int, *, every: int, last_step: int | None = None) -> bool:
    """True where the probe runs after `step`: every `every` steps, step 0 (initialisation) and the last.

    Args:
        step: 1-based; 0 is before the first update.
        every: M; 0 turns probing off altogether.
        last_step: the last step of the run, where it is known.
    """
    return every != 0 and step >= 0 and (step % every == 0 or step == last_step)


def probe_stretch(seconds: float, elapsed_s: float) -> int:
    """How many times longer the probes' period must be for their share to come down to `PROBE_SHARE`.

    Args:
        seconds: what probes have taken so far.
        elapsed_s: time since training began.

    >>> probe_stretch(30.0, 1000.0), probe_stretch(30.0, 100.0), probe_stretch(5.0, 1000.0)
    (3, 1, 1)
    """
    if elapsed_s < PROBE_GRACE_S:
        return 1
    # A share that is exactly allowed must not be stretched by rounding.
    return max(1, math.ceil(round(seconds / elapsed_s / PROBE_SHARE, 9)))
