import json
from dataclasses import replace

from collect_helpers import specs

from loopscope.collect.coverage import at_depth, compare
from loopscope.collect.health import of_coverage


def test_complete():
    coverage = compare(specs(), specs())
    assert (coverage.missing, coverage.unexpected) == ((), ())
    assert (coverage.seen, coverage.expected, coverage.ratio) == (8, 8, 1.0)
    assert of_coverage(coverage)["severity"] == "info"


def test_missing_positions_are_named():
    coverage = compare(specs(), [v for v in specs() if v.unrolled_pos not in (3, 7)])
    assert json.loads(coverage.detail()) == {"seen": 6, "expected": 8, "missing": [3, 7]}
    row = of_coverage(coverage)
    assert (row["event"], row["severity"], row["count"], row["value"]) == ("coverage", "warn", 6, 0.75)


def test_more_than_promised_is_critical():
    coverage = compare(specs(), (*specs(), replace(specs()[-1], unrolled_pos=8)))
    assert [v.unrolled_pos for v in coverage.unexpected] == [8]
    assert of_coverage(coverage)["severity"] == "critical"


def test_other_expert_count_than_promised_is_unexpected_and_missing():
    seen = (replace(specs()[0], num_experts=64), *specs()[1:])
    coverage = compare(specs(), seen)
    assert [v.unrolled_pos for v in coverage.missing] == [0]
    assert [v.unrolled_pos for v in coverage.unexpected] == [0]


def test_nothing_promised_has_no_ratio():
    assert compare((), specs()).ratio is None


def test_a_step_of_smaller_depth_expects_fewer_visits_and_an_earlier_tail():
    assert at_depth(specs(steps=3), 1) == specs(steps=1)
    assert at_depth(specs(steps=3), 3) == specs(steps=3)
