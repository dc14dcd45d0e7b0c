"""The deep probe's section."""

import pytest
from page_reader import Page

from loopscope import open_run
from loopscope.report import write_report
from loopscope.store import RunStore

CORPUS = {"aggregation_scope": "global", "corpus_name": "core", "corpus_hash": "a" * 64}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("deep")
    with RunStore.create(tmp_path / "run") as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1), on_error="raise")
        for step in (10, 20):
            for r in range(3):
                row = {
                    "step": step,
                    "loop_step": r,
                    "loss_mean": 5.0 - r,
                    "kl_from_previous": 0.1 * r if r else None,
                }
                writer.append("probe_readout", CORPUS | row | {"readout": "tail"})
            # Another way of reading out is another quantity: it must not be mixed in.
            writer.append(
                "probe_readout", CORPUS | {"step": step, "loop_step": 0, "readout": "head", "loss_mean": 99.0}
            )
        visits = [("head", None, None), ("loop", 0, 0), ("loop", 1, 0), ("tail", None, None)]
        for position, (block, r, layer) in enumerate(visits):
            at = {"step": 20, "block": block, "unrolled_pos": position, "loop_step": r, "layer_idx": layer}
            for quantity, rho in (("margin", 1.0 + 0.1 * position), ("selection_gap", 0.9)):
                found = {"quantity": quantity, "rho_cal": rho, "shuffle_scope": "batch", "calibrated": False}
                writer.append("probe_margin", CORPUS | at | found | {"cell": "block"})
            grown = {"amplification": 0.5**position, "flipped_share": 0.1 * position, "distance_rate": 0.5}
            writer.append("probe_perturbation", CORPUS | at | grown)
            for kind, stratum, value in (("domain", "code", 0.5), ("coactivation", "all", None)):
                found = {"kind": kind, "stratum": stratum, "value": value, "chance": 0.25}
                found["null_reasons"] = None if value else '{"value": "not_applicable"}'
                writer.append("probe_specialisation", CORPUS | at | found)
            writer.append("probe_saturation", CORPUS | at | {"from_step": 10, "saturation": 0.75})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.report.page.script_bundle", lambda: "")
        write_report([open_run(tmp_path / "run")], tmp_path / "report.html")
    return Page(tmp_path / "report.html")


def test_a_line_per_loop_step_of_one_way_of_reading_out(page):
    rows = page.rows("r0-readout_loss")
    assert {(row["step"], row["loop step"]): row["value"] for row in rows} == {
        (step, r): 5 - r for step in (10, 20) for r in range(3)
    }
    assert {row["loop step"] for row in page.rows("r0-readout_kl")} == {1, 2}
    assert "Read out through: tail." in page.text


def test_margins_per_visit_and_what_bounded_scores_mean(page):
    rows = {(row["visit"], row["quantity"]): row["rho"] for row in page.rows("r0-margin_null")}
    assert rows["tail 0", "margin"] == 1.3
    assert rows["loop step 1, layer 0", "selection gap"] == 0.9
    assert len(rows) == 8
    assert "Scores here are bounded" in page.text


def test_a_disturbance_over_loop_steps(page):
    rows = page.rows("r0-perturbation")
    assert [(row["loop step"], row["layer"], row["value"]) for row in rows] == [(0, 0, 0.5), (1, 0, 0.25)]


def test_choices_that_a_disturbance_flips_and_its_factor_at_the_last_pass(page):
    assert [row["value"] for row in page.rows("r0-flipped")] == [0.1, 0.2]
    assert [(row["step"], row["layer"], row["value"]) for row in page.rows("r0-perturbation_rate")] == [
        (20, 0, 0.5)
    ]


def test_specialisation_is_told_in_units_of_chance_and_what_is_missing_is_no_number(page):
    rows = page.rows("r0-specialisation")
    assert {(row["of"], row["times"]) for row in rows} == {("domain code", 2)}
    assert rows[0]["visit"] == "head 0"
    assert "value is missing in 4 of 8 rows: not_applicable." in page.text


def test_saturation_is_a_map_from_nothing_to_everything(page):
    assert {row["saturation"] for row in page.rows("r0-saturation")} == {0.75}
    assert '"domain":[0.0,1.0]' in page.scripts[0]
