"""The deep probe's section."""

import pytest
from page_reader import Page

from loopscope import open_run
from loopscope.report import write_report
from loopscope.store import RunStore

CORPUS = {"aggregation_scope": "global", "corpus_name": "core", "corpus_hash": "a" * 64}


@pytest.fixture
def page(tmp_path, no_bundle):
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
            writer.append("probe_perturbation", CORPUS | at | {"amplification": 0.5**position})
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
    assert rows["step 1 \u00b7 layer 0", "selection_gap"] == 0.9
    assert len(rows) == 8
    assert "Scores here are bounded" in page.text


def test_a_disturbance_over_loop_steps(page):
    rows = page.rows("r0-perturbation")
    assert [(row["loop step"], row["layer"], row["value"]) for row in rows] == [(0, 0, 0.5), (1, 0, 0.25)]
