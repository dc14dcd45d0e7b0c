"""`loopscope summary`: right numbers, reasons for what is missing, and no run that it cannot show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from summary_runs import Rows, boundary, health, loss, make_run, probe, reasons, router

from loopscope.cli import main
from loopscope.cli.summary import Summary
from loopscope.errors import NotARunError


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Makes a run of rows and returns what the summary prints."""

    def show(rows: Rows = (), *, ranks: int = 1, claim: bool = True) -> str:
        path = make_run(tmp_path / "run", rows, ranks=ranks, claim=claim)
        assert Summary(path=path).run() == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 100
        return text

    return show


def _row(text: str, start: str) -> list[str]:
    """Cells of the first table row that begins with `start`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return re.split(r"\s{2,}", line.strip())


def test_a_run_without_a_step(shown) -> None:
    text = shown(claim=False)
    assert "no training step recorded yet" in text
    assert "no attempt yet" in text
    assert "Routers: no step traced" in text
    assert "Probe: none ran" in text
    assert "Loop: no pair of loop steps traced" in text


def test_a_run_that_only_has_losses(shown) -> None:
    text = shown([loss(step, 4.0 - step) for step in (1, 2, 3)])
    assert "steps 1–3 (3 recorded)" in text
    assert _row(text, "task_loss") == ["task_loss", "3.000", "1.000", "-2.000", "1.000", "3"]
    assert "Routers: no step traced" in text


def test_the_lowest_loss_need_not_be_the_last(shown) -> None:
    text = shown([loss(1, 5.0), loss(2, 2.0), loss(3, 3.0)])
    assert _row(text, "task_loss") == ["task_loss", "5.000", "3.000", "-2.000", "2.000", "2"]


def test_one_step(shown) -> None:
    text = shown([loss(1, 5.0), router(1, 0, 0.5), health(1, "coverage", value=1.0, count=1)])
    assert _row(text, "task_loss") == ["task_loss", "5.000", "5.000", "0", "5.000", "1"]
    assert "every expected visit seen at all 1 traced step(s)" in text


def test_the_lowest_rank_speaks_where_no_row_is_global_and_it_is_said(shown) -> None:
    text = shown([loss(1, 4.0, rank=1), loss(1, 2.0, rank=0)], ranks=2)
    assert "Loss (nats, rank-local: rank 0 of 2)" in text
    assert _row(text, "task_loss")[1:3] == ["2.000", "2.000"]


def test_global_rows_win_over_the_ranks_own(shown) -> None:
    text = shown([loss(1, 2.0), loss(1, 7.0, rank=None, aggregation_scope="global")], ranks=2)
    assert _row(text, "task_loss")[1] == "7.000"
    assert "rank-local" not in text


def test_a_missing_value_has_its_reason(shown) -> None:
    text = shown([loss(1, None, null_reasons=reasons(task_loss="nonfinite", lr="absent:unknown"))])
    assert _row(text, "task_loss")[1] == "–"
    assert "task_loss: nonfinite" in text
    assert "lr: absent:unknown" in text
    assert "grad_norm: not recorded" in text


def test_closure_that_is_broken_is_said(shown) -> None:
    text = shown([loss(1, 3.0), loss(2, 3.0, closure_error=-0.5), loss(3, 3.0, closure_error=1e-7)])
    assert "at most 5.0e-01 over 3 step(s); too large at 1 step(s), first 2" in text


def test_a_gap_between_steps_is_said(shown) -> None:
    assert "2 step(s) between them have no loss row" in shown([loss(1, 3.0), loss(4, 2.0)])


def test_worst_visits_are_the_worst_of_each_depth(shown) -> None:
    rows = [router(5, 1, 3.0), router(10, 1, 1.0), router(5, 0, 0.2), router(10, 0, 2.0), router(10, 2, None)]
    text = shown(rows)
    worst = text[text.index("Worst visits") : text.index("Every depth")]
    cells = [re.split(r"\s{2,}", line.strip()) for line in worst.splitlines()[3:] if line.strip()]
    assert [(row[0], row[3], row[4]) for row in cells] == [
        ("1", "5", "3.00"),
        ("0", "10", "2.00"),
        ("2", "10", "–"),
    ]
    assert "Every depth at step 10" in text


def test_every_depth_keeps_numeric_order(shown) -> None:
    text = shown([router(1, pos, 0.1) for pos in (10, 2, 0, 1)])
    depths = text[text.index("Every depth") :].splitlines()[3:7]
    assert [line.split()[0] for line in depths] == ["0", "1", "2", "10"]


def test_visits_are_called_by_block_loop_step_and_layer(shown) -> None:
    text = shown([router(1, 0, 0.1), router(1, 2, 0.1), router(1, 3, 0.1, block="tail")])
    assert _row(text, "0")[:3] == ["0", "head 0", "16/2"]
    assert _row(text, "2")[:3] == ["2", "loop step 1, layer 0", "16/2"]
    assert _row(text, "3")[:3] == ["3", "tail 0", "16/2"]


def test_loop_convergence_first_and_last(shown) -> None:
    rows = [
        boundary(step, to, delta)
        for step, deltas in ((1, (0.5, 0.4)), (9, (0.3, 0.1)))
        for to, delta in enumerate(deltas, 1)
    ]
    text = shown([*rows, boundary(5, 1, 9.0)])
    assert _row(text, "1       0 → 1")[2] == "0.500"
    assert _row(text, "9       0 → 1")[2] == "0.300"
    assert "9.00" not in text
    assert "at step 9 the move per pass shrinks with every pass (0.300 → 0.100)" in text


def test_a_loop_that_does_not_shrink_is_not_praised(shown) -> None:
    assert "does not shrink" in shown([boundary(1, 1, 0.1), boundary(1, 2, 0.4)])


def test_probe_by_bucket_in_the_buckets_order(shown) -> None:
    strata = [
        ("repetition", "high"),
        ("repetition", "low"),
        ("all", "all"),
        ("domain", "code"),
        ("repetition", "mid"),
    ]
    rows = [probe(step, kind, name, 4.0 - step / 10) for step in (0, 10) for kind, name in strata]
    text = shown(rows)
    table = text[text.index("Probe loss") : text.index("Health")].splitlines()[3:8]
    assert [re.split(r"\s{2,}", line)[0] for line in table] == [
        "all",
        "repetition low",
        "repetition mid",
        "repetition high",
        "domain code",
    ]
    assert _row(text, "repetition low") == ["repetition low", "3", "4.000", "3.000", "-1.000"]


def test_corpora_with_different_tokens_are_never_compared(shown) -> None:
    text = shown([probe(0, "all", "all", 4.0), probe(10, "all", "all", 3.0, corpus="b" * 64)])
    assert text.count("Probe loss") == 2
    assert "-1.000" not in text


def test_incomplete_coverage_is_loud(shown) -> None:
    rows = [
        health(1, "coverage", value=1.0, count=8),
        health(2, "coverage", "warn", value=0.5, count=4, detail="missing 4, 5, 6, 7"),
    ]
    text = shown(rows)
    assert "1 of 2 traced step(s) incomplete, first at step 2: missing 4, 5, 6, 7" in text


def test_errors_before_the_first_loss_row_are_shown(shown) -> None:
    text = shown([health(0, "error", "critical", detail="the probe failed")])
    assert "no training step recorded yet" in text
    assert "the probe failed" in text


def test_events_are_counted_and_explained(shown) -> None:
    rows = [
        loss(1, 1.0),
        health(3, "nonfinite", "critical", count=7, unrolled_pos=2, detail="router_logits: 7 values"),
        health(5, "nonfinite", "critical", count=1, unrolled_pos=2, detail="later"),
        health(5, "timing", value=0.002),
        health(6, "timing", value=0.004),
    ]
    text = shown(rows)
    assert _row(text, "nonfinite") == ["nonfinite", "2", "8", "3", "5", "router_logits: 7 values"]
    assert "cost: 3.0 ms per traced step of a rank on average, at most 4.0 ms (2 traced steps)" in text


def test_text_of_a_row_is_never_markup(shown) -> None:
    assert "[red]x[/red] [0, 1]" in shown([health(1, "error", "critical", detail="[red]x[/red] [0, 1]")])


def test_a_rolled_back_step_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from loopscope.store import RunStore

    path = make_run(tmp_path / "run", [loss(step, 9.0) for step in (1, 2, 3)])
    with RunStore.open(path) as store:
        attempt = store.claim_attempt(first_step=2, parent_attempt=1)
        writer = store.writer(attempt=attempt, on_error="raise")
        for step in (2, 3, 4):
            writer.append(
                "loss", {"rank": 0, "world_size": 1, "aggregation_scope": "rank_local"} | loss(step, 1.0)[1]
            )
    assert main(["summary", str(path)]) == 0
    text = capsys.readouterr().out
    assert "steps 1–4 (4 recorded)" in text
    assert _row(text, "1        –")[:4] == ["1", "–", "1", "0–1"]
    assert _row(text, "2        1")[:4] == ["2", "1", "2", "2–"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotARunError):
        Summary(path=tmp_path).run()
    assert main(["summary", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def overlap(
    layer: int, first: int, second: int, value: float, step: int = 10
) -> tuple[str, dict[str, object]]:
    return "probe_overlap", {
        "step": step,
        "corpus_name": "core",
        "corpus_hash": "a" * 64,
        "layer_idx": layer,
        "from_loop_step": first,
        "to_loop_step": second,
        "topk_overlap": value,
        "overlap_chance": 0.125,
    }


def test_the_overlap_matrix_is_symmetric_and_of_the_last_probe(shown) -> None:
    rows = [
        overlap(0, 0, 1, 0.25, step=0),
        overlap(0, 0, 1, 0.5),
        overlap(0, 0, 2, 0.75),
        overlap(0, 1, 2, 0.6),
    ]
    text = shown(rows)
    assert "layer 0, probe at step 10" in text
    assert "by chance 0.125" in text
    matrix = text[text.index("Top-k overlap of loop steps") :].splitlines()[3:6]
    assert [line.split() for line in matrix] == [
        ["0", "1", "0.500", "0.750"],
        ["1", "0.500", "1", "0.600"],
        ["2", "0.750", "0.600", "1"],
    ]
    assert "0.250" not in text


def test_a_wide_matrix_shows_its_first_and_last_step(shown) -> None:
    rows = [overlap(0, a, b, 0.5) for a in range(30) for b in range(a + 1, 30)]
    text = shown(rows)
    assert "10 of 30 loop steps shown" in text
    assert re.search(r"loop step\s+0 .* 29\s*$", text, re.M)


def test_loss_by_repetition_in_context(shown) -> None:
    text = shown([probe(step, "in_context_token", "2-3", 4.0 - step / 10) for step in (0, 10)])
    assert _row(text, "target seen 2-3×")[2:] == ["4.000", "3.000", "-1.000"]


def test_the_deep_probe_by_loop_step_and_by_visit(shown) -> None:
    base = {"step": 10, "corpus_name": "core", "corpus_hash": "a" * 64}
    readouts = [
        ("probe_readout", {**base, "readout": "tail", "loop_step": step, "loss_mean": 4.0 - step})
        for step in (0, 1)
    ]
    visit = {**base, "block": "loop", "unrolled_pos": 1, "loop_step": 0, "layer_idx": 0}
    margins = [
        (
            "probe_margin",
            {
                **visit,
                "quantity": quantity,
                "shuffle_scope": "batch",
                "rho_cal": value,
                "cell": "block",
                "calibrated": True,
            },
        )
        for quantity, value in (("margin", 1.01), ("selection_gap", 1.25))
    ]
    growth = [("probe_perturbation", {**visit, "amplification": 2.5, "flipped_share": 0.125})]
    text = shown([*readouts, *margins, *growth])
    assert "Readout per loop step, through the tail, probe at step 10" in text
    line = next(line for line in text.splitlines() if "loop step 0, layer 0" in line)
    assert line.split()[-5:] == ["1.01", "1.25", "block", "2.50", "0.125"]
