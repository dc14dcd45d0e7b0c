"""Numbers for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.cli.console import MISSING, make_console, number, working
from loopscope.cli.sections.rows import change


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, MISSING),
        (math.nan, MISSING),
        (math.inf, MISSING),
        (0.0, "0"),
        (7, "7"),
        (12345678, "12345678"),
        (0.123456, "0.1235"),
        (-12.3456, "-12.35"),
        (9999.6, "10000"),
        (9999.0, "9999"),
        (0.0001234, "1.234e-04"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or 1e-300 < abs(x) < 1e300))
def test_a_number_is_never_further_off_than_its_digits(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=5e-4, abs=0)


def test_change_has_a_sign_and_no_rounding_noise() -> None:
    assert change(1.0, 3.5) == "+2.500"
    assert change(3.5, 1.0) == "-2.500"
    assert change(2e-4, 2e-4 + 5e-20) == "0"
    assert change(None, 1.0) == MISSING


def test_a_pipe_is_a_hundred_columns_wide_and_gets_no_spinner(capfd: pytest.CaptureFixture[str]) -> None:
    assert make_console().width == 100
    with working("busy"):
        pass
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
