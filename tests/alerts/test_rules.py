"""Each rule at its bound, against numbers worked out by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loopscope.alerts import RULES, AlertSettings
from loopscope.catalog import rules
from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rows import VISIT as VISIT_KEYS
from loopscope.catalog.rows import columns_of, visit_labels
from loopscope.catalog.rule_registry import JUDGES, RULE_COLUMNS
from loopscope.errors import ConfigError

S = AlertSettings()
VISIT = {"num_experts": 16, "top_k": 2, "num_tokens": 100_000}


def read(name, *rows):
    """What a rule says of rows of one step: its one reading; None where it cannot judge."""
    judgement = RULES[name].judgements[0]
    batch = RowBatch(
        judgement.table, lambda column: [row.get(column, 1 if column == "step" else None) for row in rows]
    )
    with np.errstate(all="ignore"):
        found = judgement.judge(batch, S, {})
    if found is None or np.isnan(found.excess).all():
        return None
    (value,), (excess,) = found.value.tolist(), found.excess.tolist()
    critical = found.critical is not None and bool(found.critical[0])
    return SimpleNamespace(value=value, excess=excess, critical=critical, text=found.text(0))


def test_every_rule_is_one_file_and_reads_what_it_says_it_reads():
    files = {path.stem for path in Path(rules.__path__[0]).glob("*.py")}
    assert files == {*RULES, "events", "__init__"}
    for table, judges in JUDGES.items():
        for rule, judge in judges:
            (judgement,) = (each for each in rule.judgements if each.table == table)
            # Not one column more than it says: any other is a KeyError.
            columns = {name: np.array([], dtype=object) for name in ("step", *judgement.columns)}
            judge(RowBatch(table, columns.__getitem__), S, {})
            assert set(judgement.columns) <= set(RULE_COLUMNS[table])


def test_maxvio_is_judged_against_its_maximum():
    # E/k − 1 = 7: warn above 2.1, critical above 4.2
    at = {value: read("maxvio", VISIT | {"maxvio_count": value}) for value in (2.0, 2.2, 4.3)}
    assert [reading.excess > 1 for reading in at.values()] == [False, True, True]
    assert [reading.critical for reading in at.values()] == [False, False, True]
    assert at[2.2].excess == pytest.approx(2.2 / 2.1)


def test_maxvio_of_few_tokens_is_judged_against_sampling_noise():
    noise = 3 * math.sqrt(2 * math.log(64) * 64 / (8 * 32))
    row = {"num_experts": 64, "top_k": 8, "num_tokens": 32, "maxvio_count": 0.99 * noise}
    assert noise > 0.6 * (64 / 8 - 1)
    reading = read("maxvio", row)
    assert reading.excess == pytest.approx(0.99)
    assert not reading.critical


@pytest.mark.parametrize(
    "change", [{"top_k": 16}, {"num_experts": 0}, {"num_tokens": 0}, {"maxvio_count": None}]
)
def test_maxvio_is_not_judged_where_it_cannot_be(change):
    assert read("maxvio", VISIT | {"maxvio_count": 1.0} | change) is None


def test_load_entropy_compares_shortfalls():
    assert read("load_entropy", {"load_entropy_ratio": 0.84}).excess == pytest.approx(0.8)
    assert read("load_entropy", {"load_entropy_ratio": 0.79}).excess > 1
    assert read("load_entropy", {"load_entropy_ratio": 0.49}).critical
    assert read("load_entropy", {"load_entropy_ratio": None}) is None


def test_collapse_needs_both_sure_and_identical():
    sure = {"num_experts": 16, "token_entropy_ratio": 0.01}
    assert read("router_collapse", sure | {"mutual_information": 0.5 * math.log(16)}).excess < 1
    assert read("router_collapse", sure | {"mutual_information": 0.01}).excess > 1
    identical = {"num_experts": 16, "token_entropy_ratio": 0.9, "mutual_information": 0.0}
    assert read("router_collapse", identical).excess < 1
    assert read("router_collapse", sure | {"token_entropy_ratio": 0, "mutual_information": 0}).excess > 1


def test_z_takes_the_worse_of_mean_and_largest_logit():
    bound = math.log(16) + 10
    assert read("z", {"num_experts": 16, "z_mean": -1.1 * bound}).excess == pytest.approx(1.1)
    assert read("z", {"num_experts": 16, "z_mean": 1.0, "logit_abs_max": 51}).excess == pytest.approx(1.02)
    # A sigmoid router has no z; its logits are judged still.
    assert read("z", {"num_experts": 16, "z_mean": None, "logit_abs_max": 5}).excess == pytest.approx(0.1)
    assert read("z", {"num_experts": 16}) is None


def pairs(growths):
    """The step boundaries of one layer."""
    boundary = {"kind": "step_boundary", "to_layer_idx": 0}
    return [boundary | {"to_loop_step": 1 + r, "growth": growth} for r, growth in enumerate(growths)]


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
    assert (read("loop_growth", *pairs(growths)).excess > 1) is broken


def test_two_step_boundaries_cannot_tell_whether_growth_falls():
    assert read("loop_growth", *pairs([2.0, 2.0])) is None


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
    reading = read("closure", row | {"closure_error": extra})
    assert reading.excess > 1
    assert words in reading.text


def test_closure_allows_float32_noise_of_a_large_total():
    assert read("closure", {"closure_error": 9e-4, "total_loss": 10.0}).excess == pytest.approx(0.9)


def test_health_events_find_their_rule():
    def found(**row):
        batch = RowBatch("health", lambda column: [row.get(column, 1 if column == "step" else None)])
        readings = {rule.name: judge(batch, S, {}) for rule, judge in JUDGES["health"]}
        return {name: reading.value[0] for name, reading in readings.items() if reading is not None}

    assert found(event="coverage", severity="info") == {}
    assert found(event="closure", severity="critical") == {}  # the loss rows say it
    assert found(event="alert", severity="critical") == {}  # a rule said it
    assert found(event="coverage", severity="warn", detail="3 missing") == {"coverage": 1}
    assert found(event="dropped_rows", severity="critical", count=7) == {"dropped": 7}
    assert found(event="brand_new", severity="warn") == {"other": 1}


def test_visits_keep_their_names_when_the_loop_gets_shorter():
    def trace(loops):
        tail = {"block": "tail", "unrolled_pos": 1 + loops, "loop_step": None, "layer_idx": None}
        loop = [
            {"block": "loop", "unrolled_pos": 1 + r, "loop_step": r, "layer_idx": 0} for r in range(loops)
        ]
        return [tail, *loop, {"block": "head", "unrolled_pos": 0, "loop_step": None, "layer_idx": None}]

    for loops in (2, 4):
        rows = trace(loops)
        batch = RowBatch(
            "router", columns_of([row | {"step": 1} for row in rows], ("step", *VISIT_KEYS)).__getitem__
        )
        names = [batch.visits.names[code] for code in batch.visits.code]
        assert (names[-1], names[0]) == ("head 0", "tail 0")
        assert names[1:-1] == [f"loop step {r}, layer 0" for r in range(loops)]


def test_many_rows_are_named_like_few():
    generator = np.random.default_rng(0)
    count = 3000
    block = generator.choice(np.array(["head", "loop", "tail", "other", None], dtype=object), count)
    columns = {
        "step": np.sort(generator.integers(0, 40, count)), "block": block,
        "unrolled_pos": generator.permutation(count),
        "loop_step": np.where(block == "loop", generator.integers(0, 9, count), np.nan),
        "layer_idx": np.where(block == "loop", generator.integers(0, 4, count), np.nan),
    }  # fmt: skip
    visits = RowBatch("router", columns.__getitem__).visits
    whole = {
        name: [None if value != value else int(value) for value in columns[name]]
        for name in ("loop_step", "layer_idx")
    }
    assert [visits.names[code] for code in visits.code] == visit_labels({**columns, **whole})
    assert len(set(visits.names)) == len(visits.names) == len(set(visits.code))


@pytest.mark.parametrize("change", [{"sustain": 0}, {"warmup_steps": -1}, {"clear_at": 1.5}, {"growth": 0.0}])
def test_wrong_settings_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        AlertSettings(**change)
