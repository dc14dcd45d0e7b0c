"""Numbers on their way to the page: the digits are those that Python would print, number by number."""

import json
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from loopscope.report.columnar import columnar, shortened


def printed(value: float) -> float | int | None:
    """One number, by decimal arithmetic; the largest ones round to infinity, which JSON does not have."""
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 1e15:
        return int(value)
    rounded = float(f"{value:.5g}")
    if not math.isfinite(rounded):
        return None
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# Ties are where binary and decimal arithmetic differ: 5 digits and a half, at every power of ten.
ties = st.builds(lambda n, e: float(f"{n}.5e{e}"), st.integers(10_000, 99_999), st.integers(-30, 30))
powers = st.builds(
    lambda e, up: math.nextafter(float(f"1e{e}"), up), st.integers(-30, 30), st.sampled_from([0, 1e300])
)


@given(st.lists(st.one_of(st.floats(), ties, powers, st.integers(-(10**17), 10**17).map(float))))
@example([0.0, -0.0, 5e-324, 1e15, 999999999999999.6, 99999.5, 1.79765e308, math.nan, math.inf])
def test_five_significant_digits_exactly(values):
    found = columnar(pa.table({"value": pa.array(values, pa.float64())}))
    expected = [printed(value) for value in values]
    assert found == {"columns": ["value"], "values": [expected]}
    assert [type(cell) for cell in found["values"][0]] == [type(cell) for cell in expected]
    again = columnar(shortened(pa.table({"value": pa.array(values, pa.float64())})))
    assert again == found
    json.dumps(found, allow_nan=False)


def test_other_types_stay_and_sums_of_integers_are_integers():
    table = shortened(
        pa.table(
            {
                "sum": pa.array([Decimal(123456789), None], pa.decimal128(38, 0)),
                "share": pa.array([Decimal("0.1234567"), None], pa.decimal128(18, 7)),
                "float": np.array([1.23456789, np.nan]),
                "count": pa.array([123456789, None], pa.int64()),
                "text": ["a", None],
                "list": [[0.123456789], None],
            }
        )
    )
    assert table.to_pydict() == {
        "sum": [123456789, None],
        "share": [0.12346, None],
        "float": [1.2346, None],
        "count": [123456789, None],
        "text": ["a", None],
        "list": [[0.123456789], None],
    }
    assert columnar(pa.table({})) == {"columns": [], "values": []}
