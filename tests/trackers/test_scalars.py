"""Rows → scalars: the keys and numbers of the trainer's own headline, and no more keys for a deeper model."""

import torch
from toy_run import IDS, loss
from tracker_helpers import Remembering

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, ProbeCorpus, RowContext
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import ACTIVE_TRACE_SINK
from loopscope.trackers import assembly


def collected(model, step=5, *, probe=True):
    """(the collector's headline of a step and of a probe, the rows that it wrote)"""
    writer = MemoryWriter()
    collector = ParquetCollector(
        writer,
        context=RowContext(run_id="r"),
        expected_visits=model.expected_visits(),
        on_error="raise",
        corpus=ProbeCorpus(
            name="tiny", hash="h", strata={"repetition": ("low", "high"), "domain": ("a", "b")}
        ),
    )
    collector.begin_step(step, tokens_seen=60)
    window = ACTIVE_TRACE_SINK.arm()
    with torch.no_grad():
        model(IDS)
    ACTIVE_TRACE_SINK.disarm()
    headline = collector.on_trace_step(step, window, model.trace_meta())
    found = collector.on_probe_step(step, window, model.trace_meta(), torch.rand(2, 6)) if probe else {}
    headline |= collector.on_metrics_step(step, loss(step), 0.5, 0.01)
    return headline, found, writer.tables


def test_they_are_the_collectors_headline_and_columns_of_the_rows():
    torch.manual_seed(0)
    headline, probe, tables = collected(ToyLoopMoE(vocab_size=11, width=8))
    found = assembly.of_step(tables)
    assert headline.keys() - {"health/dropped"} <= found.keys()
    assert all(found[key] == value for key, value in headline.items() if key != "health/dropped")
    (row,) = tables["loss"]
    assert (found["optim/grad_norm"], found["optim/lr"]) == (row["grad_norm"], row["lr"]) == (0.5, 0.01)
    assert probe.keys() == {"probe/loss", "probe/overlap_mean"}
    assert all(found[key] == value for key, value in probe.items())
    by_stratum = {(r["stratum_kind"], r["stratum"]): r["loss_mean"] for r in tables["probe_loss"]}
    assert found["probe/loss_repetition_low"] == by_stratum["repetition", "low"]
    assert set(found) <= set(assembly.CORE_KEYS)


def test_the_least_even_visit_and_the_deepest_pair():
    router = [
        {"unrolled_pos": 0, "token_entropy_ratio": 0.9, "margin_mean": None},
        {"unrolled_pos": 1, "token_entropy_ratio": 0.4, "margin_mean": 0.2},
    ]
    pairs = [
        {"kind": "step_boundary", "to_pos": 3, "state_cosine": 0.1, "topk_overlap": 0.2},
        {"kind": "step_boundary", "to_pos": 7, "state_cosine": 0.5, "topk_overlap": None},
        {"kind": "wrap", "to_pos": 9, "state_cosine": 0.9, "topk_overlap": 0.9},
    ]
    found = assembly.of_step({"router": router, "transition": pairs})
    assert found == {"moe/token_entropy_min": 0.4, "moe/margin_min": 0.2, "loop/state_cosine_last": 0.5}


def test_what_does_not_exist_is_left_out():
    assert assembly.of_step({}) == assembly.of_step({"loss": [], "health": []}) == {}
    assert assembly.of_step({"loss": [{"task_loss": 1.0, "total_loss": None}]}) == {"loss/task": 1.0}


def test_the_users_own_metrics_are_summed_up_over_visits():
    rows = [{"event": "custom:mine.norm", "value": float(pos)} for pos in range(5)]
    assert assembly.of_step({"health": rows}) == {"custom/mine.norm_mean": 2.0, "custom/mine.norm_max": 4.0}


def test_a_deeper_model_has_the_same_keys():
    torch.manual_seed(0)

    def tables(steps, layers, **more):
        model = ToyLoopMoE(vocab_size=11, width=8, num_stacks=steps, num_layers_in_stack=layers)
        return collected(model, **more)[2]

    shallow, longer, deep = tables(2, 1), tables(6, 2), tables(64, 4, probe=False)
    assert len(deep["router"]) == 64 * 4 + 2
    of_trace = {key for key in assembly.of_step(shallow) if not key.startswith("probe/")}
    assert of_trace == assembly.of_step(deep).keys()
    assert assembly.of_step(shallow).keys() == assembly.of_step(longer).keys() > of_trace
    assert len(longer["probe_overlap"]) > len(shallow["probe_overlap"])


def test_a_remembering_tracker_is_a_tracker():
    from loopscope.trackers import Tracker

    tracker: Tracker = Remembering()
    assert tracker.own_keys == ()
