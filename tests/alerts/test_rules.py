"""Each rule at its bound, against numbers worked out by hand."""

import math

import pytest

from loopscope.alerts import AlertSettings, rules
from loopscope.alerts.table import EVENTS, RULES
from loopscope.errors import ConfigError

S = AlertSettings()
VISIT = {"num_experts": 16, "top_k": 2, "num_tokens": 100_000}


def test_maxvio_is_judged_against_its_maximum():
    # E/k − 1 = 7: warn above 2.1, critical above 4.2
    at = {value: rules.maxvio(VISIT | {"maxvio_count": value}, "v", S) for value in (2.0, 2.2, 4.3)}
    assert [reading.excess > 1 for reading in at.values()] == [False, True, True]
    assert [reading.critical for reading in at.values()] == [False, False, True]
    assert at[2.2].excess == pytest.approx(2.2 / 2.1)


def test_maxvio_of_few_tokens_is_judged_against_sampling_noise():
    noise = 3 * math.sqrt(2 * math.log(64) * 64 / (8 * 32))
    row = {"num_experts": 64, "top_k": 8, "num_tokens": 32, "maxvio_count": 0.99 * noise}
    assert noise > 0.6 * (64 / 8 - 1)
    reading = rules.maxvio(row, "v", S)
    assert reading.excess == pytest.approx(0.99)
    assert not reading.critical


@pytest.mark.parametrize(
    "change", [{"top_k": 16}, {"num_experts": 0}, {"num_tokens": 0}, {"maxvio_count": None}]
)
def test_maxvio_is_not_judged_where_it_cannot_be(change):
    assert rules.maxvio(VISIT | {"maxvio_count": 1.0} | change, "v", S) is None


def test_load_entropy_compares_shortfalls():
    assert rules.load_entropy({"load_entropy_ratio": 0.84}, "v", S).excess == pytest.approx(0.8)
    assert rules.load_entropy({"load_entropy_ratio": 0.79}, "v", S).excess > 1
    assert rules.load_entropy({"load_entropy_ratio": 0.49}, "v", S).critical
    assert rules.load_entropy({"load_entropy_ratio": None}, "v", S) is None


def test_collapse_needs_both_sure_and_identical():
    sure = {"num_experts": 16, "token_entropy_ratio": 0.01}
    assert rules.router_collapse(sure | {"mutual_information": 0.5 * math.log(16)}, "v", S).excess < 1
    assert rules.router_collapse(sure | {"mutual_information": 0.01}, "v", S).excess > 1
    identical = {"num_experts": 16, "token_entropy_ratio": 0.9, "mutual_information": 0.0}
    assert rules.router_collapse(identical, "v", S).excess < 1
    assert (
        rules.router_collapse(sure | {"token_entropy_ratio": 0, "mutual_information": 0}, "v", S).excess > 1
    )


def test_z_takes_the_worse_of_mean_and_largest_logit():
    bound = math.log(16) + 10
    assert rules.z({"num_experts": 16, "z_mean": -1.1 * bound}, "v", S).excess == pytest.approx(1.1)
    assert rules.z({"num_experts": 16, "z_mean": 1.0, "logit_abs_max": 51}, "v", S).excess == pytest.approx(
        1.02
    )
    # A sigmoid router has no z; its logits are judged still.
    assert rules.z({"num_experts": 16, "z_mean": None, "logit_abs_max": 5}, "v", S).excess == pytest.approx(
        0.1
    )
    assert rules.z({"num_experts": 16}, "v", S) is None


@pytest.mark.parametrize(
    ("growths", "broken"),
    [
        ([1.2, 1.2, 1.2], True),
        ([1.2003, 1.2002, 1.2001], True),  # noise is no fall
        ([1.5, 1.1, 1.15], True),  # it rises again at the end
        ([math.sqrt(2), math.sqrt(3 / 2), math.sqrt(4 / 3)], False),  # equal orthogonal updates
        ([1.3, 1.2, 1.09], False),
        ([1.05, 1.05, 1.05], False),
    ],
)
def test_growth_that_falls_is_normal(growths, broken):
    assert (rules.loop_growth(growths, "layer 0", S).excess > 1) is broken


def test_two_step_boundaries_cannot_tell_whether_growth_falls():
    assert rules.loop_growth([2.0, 2.0], "layer 0", S) is None


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (0.01 * 1.3, "lb_loss) is counted twice"),
        (-0.01 * 1.3, "lb_loss) is counted not at all"),
        (2 * 0.001 * 7.0, "z_loss) is counted three times"),
        (0.0077, "closure_error"),
    ],
)
def test_closure_says_which_loss_would_explain_it(extra, words):
    row = {"total_loss": 1.0, "lb_loss": 1.3, "lb_loss_factor": 0.01, "z_loss": 7.0, "z_loss_factor": 0.001}
    reading = rules.closure(row | {"closure_error": extra}, S)
    assert reading.excess > 1
    assert words in reading.text


def test_closure_allows_float32_noise_of_a_large_total():
    assert rules.closure({"closure_error": 9e-4, "total_loss": 10.0}, S).excess == pytest.approx(0.9)


def test_health_events_find_their_rule():
    def reading(**row):
        return rules.health_events(row, EVENTS)

    assert reading(event="coverage", severity="info") is None
    assert reading(event="closure", severity="critical") is None  # the loss rows say it
    assert reading(event="coverage", severity="warn", detail="3 missing").rule == "coverage"
    assert reading(event="dropped_rows", severity="critical", count=7).value == 7
    assert reading(event="brand_new", severity="warn").rule == "other"
    assert set(EVENTS.values()) <= set(RULES)


def test_visits_keep_their_names_when_the_loop_gets_shorter():
    def trace(loops):
        loop = [
            {"block": "loop", "unrolled_pos": 1 + r, "loop_step": r, "layer_idx": 0} for r in range(loops)
        ]
        tail = {"block": "tail", "unrolled_pos": 1 + loops, "loop_step": None, "layer_idx": None}
        return [tail, *loop, {"block": "head", "unrolled_pos": 0}]

    for loops in (2, 4):
        names = [name for _, name in rules.visit_names(trace(loops))]
        assert (names[0], names[-1]) == ("head 0", "tail 0")
        assert names[1:-1] == [f"loop step {r}, layer 0" for r in range(loops)]


@pytest.mark.parametrize("change", [{"sustain": 0}, {"warmup_steps": -1}, {"clear_at": 1.5}, {"growth": 0.0}])
def test_wrong_settings_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        AlertSettings(**change)
