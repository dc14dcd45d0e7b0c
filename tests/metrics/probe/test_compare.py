import math

import numpy as np
import pytest
from scipy.stats import entropy, t

from loopscope.metrics.probe.compare import entropy_by_document, simultaneous_intervals


def intervals(values, seed=0, **how):
    return simultaneous_intervals(np.asarray(values, dtype=float), np.random.default_rng(seed), **how)


def related(draw, shape, noise):
    """Differences without a mean of their own; half of their variance is the document's."""
    documents, places = shape
    return np.sqrt(0.5) * (noise(draw, (documents, 1)) + noise(draw, (documents, places)))


NOISE = {
    "normal": lambda draw, size: draw.normal(size=size),
    "skewed": lambda draw, size: draw.exponential(size=size) - 1,
    "heavy": lambda draw, size: draw.standard_t(3, size=size),
}


def test_no_difference_is_no_meaningful_difference():
    (found,) = intervals(np.zeros((20, 1)))
    assert (found.mean, found.low, found.high, found.meaningful) == (0.0, 0.0, 0.0, False)


def test_what_is_the_same_in_every_document_is_known_exactly():
    same, noise = intervals(np.stack([np.full(20, 0.1), np.random.default_rng(0).normal(size=20)], axis=1))
    assert same.low == same.high == same.mean == pytest.approx(0.1)
    assert same.meaningful
    assert not noise.meaningful


@pytest.mark.parametrize("documents", [1, 2, 4])
def test_few_documents_say_nothing(documents):
    (found,) = intervals([[3.0]] * documents)
    assert (found.mean, found.low, found.high) == (3.0, -math.inf, math.inf)
    assert (found.meaningful, found.known) == (False, False)


def test_few_documents_that_differ_by_noise_show_nothing_beyond_the_promise():
    draw = np.random.default_rng(3)
    shown = sum(
        any(one.meaningful for one in intervals(draw.normal(size=(5, 24)), seed=seed, num_bootstraps=300))
        for seed in range(60)
    )
    assert shown <= 7  # 3 expected at most; more than 7 of 60 has a probability below 1% at 5%


def test_one_odd_document_leaves_an_interval():
    # A third of the resamples leave it out and do not vary at all: without a bound their statistic is infinite.
    (found,) = intervals([[0.0]] * 7 + [[1.0]])
    assert found.known
    assert found.low < 0 < found.mean < found.high < 2


def test_what_is_not_finite_is_not_known_and_spoils_no_other():
    values = np.random.default_rng(2).normal(size=(20, 3))
    clean = intervals(values[:, [0, 2]], shares=[False, False])
    values[4, 1] = math.nan
    found = intervals(values, shares=[False, True, False])
    assert [found[0], found[2]] == clean
    assert math.isnan(found[1].mean)
    assert (found[1].meaningful, found[1].known) == (False, False)


def test_noise_around_zero_is_not_and_a_shift_is_meaningful():
    noise = np.random.default_rng(1).normal(size=(60, 1))
    noise -= noise.mean()
    assert not intervals(noise)[0].meaningful
    assert intervals(noise + 2)[0].meaningful
    assert intervals(noise - 2)[0].meaningful


@pytest.mark.parametrize("documents", [13, 400])
def test_one_interval_of_a_normal_mean_is_students(documents):
    values = np.random.default_rng(2).normal(3, 1, size=(documents, 1))
    (found,) = intervals(values, num_bootstraps=20000)
    half = t.ppf(0.975, documents - 1) * values.std(ddof=1) / np.sqrt(documents)
    assert found.high - found.mean == pytest.approx(half, rel=0.1)
    assert found.mean - found.low == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("documents", [13, 79])
def test_tables_without_a_difference_rarely_show_one(documents, noise):
    """200 pairs of checkpoints that differ by noise alone, 25 intervals each: at most 5% may show anything."""
    draw = np.random.default_rng(7)
    alarms = sum(
        any(
            one.meaningful
            for one in intervals(related(draw, (documents, 25), NOISE[noise]), num_bootstraps=400)
        )
        for _ in range(200)
    )
    # Where 5% were true, more than 18 of 200 had a chance of 1%.
    assert alarms <= 18


def test_a_difference_in_one_place_is_found_there_alone():
    draw = np.random.default_rng(3)
    found = others = 0
    for _ in range(50):
        values = related(draw, (79, 25), NOISE["normal"])
        values[:, 11] += 0.8
        seen = [index for index, one in enumerate(intervals(values, num_bootstraps=400)) if one.meaningful]
        found += 11 in seen
        others += seen not in ([], [11])
    assert found >= 48
    assert others <= 7  # of 50, at 5% each


def test_more_places_make_wider_intervals_and_copies_of_one_do_not():
    values = related(np.random.default_rng(5), (40, 60), NOISE["normal"])
    alone, among = intervals(values[:, :1])[0], intervals(values)[0]
    assert among.high - among.low > 1.3 * (alone.high - alone.low)
    copies = intervals(np.repeat(values[:, :1], 60, axis=1))
    assert all(one == copies[0] for one in copies)
    assert copies[0].high == pytest.approx(alone.high, rel=1e-9)


def test_a_share_begins_at_zero_and_few_changes_mean_nothing():
    few, many = np.zeros(20), np.zeros(20)
    few[3], many[:] = 0.05, np.random.default_rng(0).uniform(0.02, 0.08, size=20)
    one, other = intervals(np.stack([few, many], axis=1), shares=[True, True])
    assert (one.low, one.meaningful) == (0.0, False)
    assert other.meaningful
    assert 0 < other.low < other.mean < other.high
    # Shares that hardly ever change must not widen the intervals of what varies in every document.
    noise = np.random.default_rng(1).normal(size=20)
    beside = intervals(np.stack([few, noise], axis=1), shares=[True, False])[1]
    assert beside.high - beside.low < 1.3 * (lambda alone: alone.high - alone.low)(
        intervals(noise[:, None])[0]
    )


def test_entropy_against_scipy():
    probs = np.random.default_rng(3).dirichlet([0.3] * 6, size=(4, 9))
    probs[0, 0] = [1, 0, 0, 0, 0, 0]
    assert entropy_by_document(probs) == pytest.approx(entropy(probs, axis=-1).mean(-1))


def test_a_corpus_is_called_small_where_nothing_has_an_interval():
    from loopscope.metrics.probe import compare, null_margin
    from loopscope.probe.build import FEW_DOCUMENTS

    assert FEW_DOCUMENTS == compare.MIN_DOCUMENTS == null_margin.MIN_DOCUMENTS
