"""The file itself: self-contained, honest about thinning and missing values, deaf to hostile names."""

import json
import re
from dataclasses import replace

import altair as alt
import numpy as np
import pyarrow as pa
import pytest
from page_reader import Page
from report_runs import Shape, generated_run

from loopscope import open_run
from loopscope.alerts import RULES, AlertSettings
from loopscope.catalog.registry import TABLES
from loopscope.errors import ConfigError, StoreError
from loopscope.report import write_report
from loopscope.report.run_page import _SECTION_OF

SHAPE = Shape()
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"


def written(tmp_path, *runs, **more):
    out = tmp_path / "report.html"
    parts = write_report([open_run(run) for run in runs], out, **more)
    return Page(out), parts


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return generated_run(tmp_path_factory.mktemp("runs") / "healthy", SHAPE)


@pytest.fixture(scope="module")
def shown(healthy, tmp_path_factory):
    """The healthy run's page, and what it was made of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.report.page.script_bundle", lambda: "")
        return written(tmp_path_factory.mktemp("shown"), healthy)


VISITS = SHAPE.loops * SHAPE.layers + 2
ROUTER_ROWS = SHAPE.steps // SHAPE.every * VISITS
TRANSITIONS = SHAPE.steps // SHAPE.every * (SHAPE.loops - 1) * SHAPE.layers


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The page of a run with missing values, empty experts and a loss that jumps, each in columns of its own."""
    fourth = np.arange(ROUTER_ROWS) % VISITS == 3
    everywhere = {"margin_p50": "not_applicable"}
    at_the_fourth = json.dumps({**everywhere, "z_mean": "nonfinite"})
    task = np.full(SHAPE.steps, 3.0)
    task[40], task[-1] = 1.25, 7.5
    changes = {
        "router": {
            "z_mean": np.where(fourth, None, 0.2).tolist(),
            "margin_p50": pa.nulls(ROUTER_ROWS, pa.float64()),
            "null_reasons": np.where(fourth, at_the_fourth, json.dumps(everywhere)).tolist(),
            "expert_count": np.tile([0, 300, 100, 100, 100, 100, 100, 0], (ROUTER_ROWS, 1)).tolist(),
        },
        "transition": {"growth": [None, *[1.2] * (TRANSITIONS - 1)]},
        "loss": {"task_loss": task},
    }
    folder = tmp_path_factory.mktemp("changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.report.page.script_bundle", lambda: "")
        page, _ = written(folder, generated_run(folder / "run", replace(SHAPE, changes=changes)))
    return page


def test_nothing_outside_the_file_is_needed(healthy, tmp_path):
    # With the real script: its own addresses are names of schemas, and the policy forbids every request.
    page, _ = written(tmp_path, healthy)
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset", "formaction"):
            target = attributes.get(name) or "#"
            assert target.startswith("#") or target == "data:,", (tag, name, target)
    policy = [
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none';")
    assert "http" not in policy[0]
    assert "url(" not in page.styles[0]
    assert "@import" not in page.styles[0]
    assert "vegaEmbed" in page.scripts[1]


def test_links_lead_somewhere_and_identifiers_are_unique(shown):
    page, _ = shown
    assert len(page.ids) == len(set(page.ids))
    targets = [a["href"][1:] for t, a in page.tags if t == "a"]
    assert set(targets) <= set(page.ids)
    drawn = [a["data-chart"] for _, a in page.tags if "data-chart" in a]
    assert set(drawn) == set(page.charts)


def test_every_chart_says_its_definition_unit_scope_and_leads_to_the_documentation(shown):
    page, parts = shown
    charts = [chart for section in parts[0].sections for chart in section.charts]
    drawn = {table for chart in charts for table, _ in chart.metrics}
    assert drawn == set(TABLES) - {"attempt"}, (
        "the run has rows of every table, and every table has a picture"
    )
    for chart in charts:
        shown = page.figures[f"r0-{chart.id}"]
        assert chart.title in shown.text, chart.id
        assert len(chart.text) > 20, f"{chart.id} does not say how to read it"
        assert f"Rows: {chart.scope}." in shown.text, chart.id
        assert chart.metrics, chart.id
        for metric in chart.metrics:
            told, anchor = TABLES[metric[0]].by_name[metric[1]], "m-{}-{}".format(*metric)
            assert len(told.formula) > 2, metric
            assert told.formula in shown.text, metric
            assert f"[{told.unit or 1}]" in shown.text, metric
            assert f"#{anchor}" in shown.links, metric
            assert told.formula in page.glossary[anchor], metric


def test_every_axis_and_colour_bar_has_a_title(shown):
    _, parts = shown
    names_only = {"visit", "quantity", "of", "row"}
    for chart in (chart for section in parts[0].sections for chart in section.charts):
        for layer in chart.spec.get("layer", [chart.spec]):
            for channel in ("x", "y", "color"):
                encoding = layer.get("encoding", {}).get(channel, {})
                if "field" not in encoding or encoding["field"] in names_only or "axis" not in encoding:
                    continue
                assert encoding.get("title"), (chart.id, channel)


@pytest.mark.usefixtures("no_bundle")
def test_every_specification_is_valid_vega_lite(healthy, tmp_path):
    _, (page,) = written(tmp_path, healthy)
    _, (rolled, _) = written(tmp_path, healthy, healthy, by="tokens")
    kinds = {}
    for chart in (chart for each in (page, rolled) for section in each.sections for chart in section.charts):
        # Charts of one kind differ in their texts alone; one with marks or a bound is another kind.
        kinds.setdefault(re.sub(r'"(?!type")[^"]*": "[^"]*"', "", json.dumps(chart.spec)), chart)
    assert len(kinds) > 10
    for chart in kinds.values():
        alt.LayerChart.from_dict(dict(chart.spec), validate=True)


@pytest.mark.usefixtures("no_bundle")
def test_the_documentation_in_the_page_is_the_catalogues(healthy, tmp_path):
    page, parts = written(tmp_path, healthy)
    drawn = {metric for section in parts[0].sections for chart in section.charts for metric in chart.metrics}
    assert set(page.glossary) == {f"m-{table}-{name}" for table, name in drawn}
    for table, name in drawn:
        column = TABLES[table].by_name[name]
        for said in (column.name, column.formula, column.merge, column.null_rule, column.source):
            assert said in page.glossary[f"m-{table}-{name}"], (table, name)


def test_a_cell_without_a_value_keeps_its_place_and_says_why(changed):
    found = {(row["visit"], row["z_mean"], row["missing"]) for row in changed.rows("r0-z")}
    assert {row for row in found if row[1] is None} == {("loop step 1, layer 0", None, "nonfinite")}
    assert len(found) == VISITS
    # The drawing tells them apart: one layer for each.
    conditions = [layer["transform"][0]["filter"] for layer in changed.charts["r0-z"]["spec"]["layer"]]
    assert conditions == ["isValid(datum['z_mean'])", "!isValid(datum['z_mean'])"]


def test_transitions_say_what_is_missing_among_the_drawn_rows_alone(changed):
    assert f"growth is missing in 1 of {TRANSITIONS} rows: no reason recorded." in changed.text


def test_every_rule_points_at_a_place_that_exists(shown):
    page, parts = shown
    for rule in RULES.values():
        assert f"r0-{rule.chart}" in page.ids or f"r0-{_SECTION_OF[rule.chart]}" in page.ids, rule.name
    (part,) = parts
    for check in part.checks:
        assert part.place(check.chart) in page.ids, check.title
    lines = {rule.name: rule.check for rule in RULES.values() if rule.check is not None}
    assert {check.title for check in part.checks} == {line.title for line in lines.values()}
    told = [*lines, *(name for line in lines.values() for name in line.also)]
    assert sorted(told) == sorted(RULES), "every rule has a line of the first screen"


@pytest.mark.usefixtures("no_bundle")
def test_a_hostile_name_is_text(tmp_path):
    run = generated_run(tmp_path / "run", replace(SHAPE, steps=20), name=HOSTILE)
    page, _ = written(tmp_path, run, run)
    assert sum(1 for tag, _ in page.tags if tag == "script") == 3
    assert "img" not in [tag for tag, _ in page.tags]
    assert HOSTILE in page.text
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    # The comparison's data holds the name too, shortened; parsed again it is the same text.
    short = f"{HOSTILE[:11]}\u2026{HOSTILE[-9:]}"
    assert {row["run"] for row in page.rows("c-task_loss")} == {f"{short} (1)", f"{short} (2)"}


@pytest.mark.usefixtures("no_bundle")
def test_a_long_run_is_thinned_to_mean_smallest_and_largest_and_says_so(tmp_path):
    values = np.random.default_rng(1).normal(5, 1, 2100)
    run = generated_run(tmp_path / "run", replace(SHAPE, steps=2100, changes={"loss": {"task_loss": values}}))
    page, _ = written(tmp_path, run)
    rows = [row for row in page.rows("r0-loss") if row["series"] == "task loss"]
    assert len(rows) == 350  # buckets of 6
    buckets = values.reshape(350, 6)
    assert np.allclose([row["value"] for row in rows], buckets.mean(1), rtol=1e-4)
    assert np.allclose([row["low"] for row in rows], buckets.min(1), rtol=1e-4)
    assert np.allclose([row["high"] for row in rows], buckets.max(1), rtol=1e-4)
    assert "Thinned: 2,100 steps in buckets of 6" in page.text


def test_missing_values_are_missing_with_their_reason(changed):
    assert f"margin_p50 is missing in {ROUTER_ROWS} of {ROUTER_ROWS} rows: not_applicable." in changed.text
    assert "r0-margin" not in changed.charts


def test_experts_are_told_by_their_share_and_the_empty_ones_named(changed):
    rows = changed.rows("r0-experts_loop_layer_1")
    shares = {row["expert"]: row["share"] for row in rows if row["row"] == 0}
    assert shares == {0: 0, 1: 3, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 0}
    assert "Without a token in every row: 0, 7." in changed.text


@pytest.mark.usefixtures("no_bundle")
def test_a_rollback_is_marked_and_its_rows_are_not_drawn(tmp_path):
    from loopscope.store import RunStore

    path = tmp_path / "run"
    with RunStore.create(path) as store:
        for attempt, (steps, value) in enumerate([(range(1, 21), 9.0), (range(11, 31), 1.0)], 1):
            store.claim_attempt(first_step=steps.start, parent_attempt=attempt - 1 or None)
            writer = store.writer(attempt=attempt)
            for step in steps:
                writer.append("loss", {"step": step, "task_loss": value, "aggregation_scope": "global"})
    page, _ = written(tmp_path, path)
    drawn = {row["step"]: row["value"] for row in page.rows("r0-loss")}
    assert drawn == {step: 9 if step < 11 else 1 for step in range(1, 31)}
    assert "attempt 2 began at step 11 from attempt 1" in page.text
    assert "10 rows that a rollback replaced are not drawn" in page.text


@pytest.mark.usefixtures("no_bundle")
def test_the_bound_of_the_closure_is_the_one_that_the_run_is_judged_by(healthy, tmp_path):
    page, _ = written(tmp_path, healthy, settings=AlertSettings(closure=0.5))
    bounds = [row for row in page.rows("r0-closure") if row["series"] == "bound"]
    assert bounds
    assert all(row["value"] >= 0.5 for row in bounds)


def test_the_first_screen_says_where_the_loss_is_and_was(changed):
    assert f"7.5 at step {SHAPE.steps}; lowest 1.25 at step 41" in changed.text


@pytest.mark.usefixtures("no_bundle")
def test_several_runs_begin_with_one_line_each_and_keep_their_colours(tmp_path):
    shape = replace(SHAPE, steps=20)
    rising = {"closure_error": np.ones(20), "grad_norm": [None] * 20}
    long = "a-model-with-a-long-name-of-november-seed-"
    runs = [
        generated_run(tmp_path / "one", shape, name=long + "1"),
        generated_run(tmp_path / "two", replace(shape, changes={"loss": rising}), name=long + "2"),
        generated_run(tmp_path / "three", shape, name="short"),
    ]
    out = tmp_path / "report.html"
    write_report([open_run(run) for run in runs], out)
    page = Page(out)
    begin = page.text[: page.text.index("Side by side")]
    assert "Comparison of 3 runs" in begin
    assert "Something is wrong: The total loss is not the sum of its parts." in " ".join(begin.split())
    assert begin.count("checks healthy") == 3
    names = ["a-model-wit\u2026er-seed-1", "a-model-wit\u2026er-seed-2", "short"]
    for chart in ("c-task_loss", "c-grad_norm", "c-maxvio_count"):
        # In the data's order, from which the colours follow; one without a value has a row that is not drawn.
        assert list(dict.fromkeys(row["run"] for row in page.rows(chart))) == names, chart
    folded = {
        a["id"]: "open" not in a for tag, a in page.tags if tag == "details" and a.get("class") == "section"
    }
    assert [key for key, shut in folded.items() if not shut] == ["c-s-all"]
    assert sum(folded.values()) == 3 * 9


def test_wrong_numbers_of_runs_and_a_place_that_cannot_be_written(healthy, tmp_path):
    run = open_run(healthy)
    with pytest.raises(ConfigError, match="got 0 runs"):
        write_report([], tmp_path / "a.html")
    with pytest.raises(ConfigError, match="got 9 runs"):
        write_report([run] * 9, tmp_path / "a.html")
    with pytest.raises(StoreError, match="cannot be written"):
        write_report([run], tmp_path / "no" / "a.html")
    assert list(tmp_path.iterdir()) == []


def test_no_number_is_written_that_json_does_not_know(shown):
    page, _ = shown
    assert not re.search(r"\bNaN\b|\bInfinity\b", page.scripts[0])
