from __future__ import annotations

import math

import pytest

from loopscope.catalog.registry import TRAINING_METRICS
from loopscope.metrics import CLOSURE_TOLERANCE, finish_loss

GOOD = {
    "task_loss": 2.0,
    "lb_loss": 1.5,
    "lb_loss_factor": 0.01,
    "z_loss": 4.0,
    "z_loss_factor": 0.001,
    "total_loss": 2.019,
}


def test_closed_sum():
    done = finish_loss(**GOOD)
    assert abs(done.columns["closure_error"]) < 1e-12
    assert not done.closure_violated
    assert done.columns["nonfinite_fields"] is None


def test_every_column_of_the_registry_is_there():
    done = finish_loss(**GOOD)
    assert set(done.columns) == {name for table, name in TRAINING_METRICS if table == "loss"}


def test_what_is_not_known_is_absent_never_zero():
    done = finish_loss(**GOOD)
    for name in ("other_loss", "task_loss_sum", "num_target_tokens", "grad_norm", "lr"):
        assert done.columns[name] is None
        assert done.nulls[name].startswith("absent:")


def test_other_terms_count_in_the_closure():
    assert finish_loss(**{**GOOD, "total_loss": 2.519}, other_loss=0.5).columns["closure_error"] == (
        pytest.approx(0, abs=1e-12)
    )


@pytest.mark.parametrize("total", [0.5, 1.0, 250.0])
def test_the_bound_is_relative_to_large_totals_only(total):
    parts = {**dict.fromkeys(GOOD, 0.0), "task_loss": total}
    bound = CLOSURE_TOLERANCE * max(1.0, total)
    assert not finish_loss(**{**parts, "total_loss": total + 0.9 * bound}).closure_violated
    assert finish_loss(**{**parts, "total_loss": total + 1.1 * bound}).closure_violated
    assert finish_loss(**{**parts, "total_loss": total - 1.1 * bound}).closure_violated


@pytest.mark.parametrize("missed", ["lb_loss", "z_loss"])
def test_a_term_that_is_not_added_is_seen(missed):
    left_out = GOOD[missed] * GOOD[f"{missed}_factor"]
    done = finish_loss(**{**GOOD, "total_loss": GOOD["total_loss"] - left_out})
    assert done.closure_violated
    assert done.columns["closure_error"] == pytest.approx(-left_out)


def test_non_finite_components_are_named():
    done = finish_loss(**{**GOOD, "z_loss": math.inf, "total_loss": math.nan}, grad_norm=math.inf)
    assert done.columns["nonfinite_fields"] == "z_loss,total_loss,grad_norm"
    assert done.columns["z_loss"] is None
    assert done.nulls["closure_error"] == "nonfinite"
    assert not done.closure_violated


def test_counts_are_integers():
    done = finish_loss(**GOOD, task_loss_sum=20.0, num_target_tokens=10)
    assert done.columns["num_target_tokens"] == 10
    assert isinstance(done.columns["num_target_tokens"], int)
