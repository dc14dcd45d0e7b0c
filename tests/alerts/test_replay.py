"""A replay gives what the engine gives that sees every row; across resumes the training tells what a replay finds."""

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from alert_runs import OPTIONS, SETTINGS, Attempt, rows_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopscope.alerts import RULES, AlertEngine, replay
from loopscope.store import RunReader, RunStore

QUICK = settings(max_examples=20, deadline=None)


def by_name(alerts):
    return sorted(alerts, key=lambda a: (a.rule, a.subject, a.since))


@QUICK
@given(
    seed=st.integers(0, 2**32 - 1),
    sick=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    steps=st.integers(1, 40),
    depths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 600), max_size=3),
    sealed=st.booleans(),
)
def test_a_replay_is_what_the_engine_says_that_sees_every_row(seed, sick, steps, depths, cuts, sealed):
    generator = np.random.default_rng(seed)
    engine = AlertEngine(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        written = 0
        with RunStore.create(root, options=OPTIONS) as store:
            number = store.claim_attempt(first_step=1).attempt
            writer = store.writer(attempt=number, writer="r00000")
            for step in range(1, steps + 1):
                health = generator.random() < sick / 2
                tables = {}
                for table, row in rows_of(
                    step, generator, 0.9 if health else 0.1 * sick, depths[step % len(depths)]
                ):
                    tables.setdefault(table, []).append(row)
                    writer.append(table, row)
                    written += 1
                    if written in cuts:  # a step's rows in two files
                        with writer._mutex:
                            writer._chain.retire()
                for table, rows in tables.items():
                    if table in ("loss", "health"):
                        for row in rows:
                            engine.observe_rows(table, [row])
                    else:
                        engine.observe_rows(table, rows)
            if not sealed:
                store.close(seal=False)
        found = replay.replay_run(RunReader(root), SETTINGS)
    assert by_name(found.alerts) == by_name(engine.alerts)


@QUICK
@given(
    seed=st.integers(0, 2**32 - 1),
    sick=st.sampled_from([0.2, 0.6, 0.95]),
    plan=st.lists(
        st.tuples(
            st.integers(0, 12),  # steps of the attempt
            st.integers(0, 3),  # which attempt's checkpoint it goes on from
            st.sampled_from([0, 0, 1, 4, 11]),  # how many steps back that is
            st.sampled_from(["close", "kill", "kill within the trace"]),
        ),
        min_size=1,
        max_size=5,
    ),
)
@example(seed=0, sick=0.95, plan=[(7, 0, 0, "kill within the trace"), (3, 1, 0, "close")])
def test_what_was_told_over_any_history_is_what_a_replay_finds(seed, sick, plan):
    generator = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        ends: dict[int, tuple[int, int]] = {}
        for index, (count, which, back, how) in enumerate(plan):
            first, parent = 1, None
            if ends and which:
                parent = sorted(ends)[-min(which, len(ends))]
                begin, end = ends[parent]
                first = max(begin, end - back) + 1 if end >= begin else begin
            attempt = Attempt(root, first, parent)
            last = first + count - 1
            for step in range(first, last + 1):
                rows = list(rows_of(step, generator, sick))
                if step == last and how == "kill within the trace" and index < len(plan) - 1:
                    rows = rows[:-1]  # died before the rules looked
                for table, row in rows:
                    attempt.writer.append(table, row)
            ends[attempt.number] = (first, last)
            if how == "close" or index == len(plan) - 1:
                attempt.close()
            else:
                attempt.kill()
        reader = RunReader(root)
        if attempt.number not in reader.live:
            return  # the last attempt wrote nothing, so what is live are another's rows
        found = replay.replay_run(reader, SETTINGS).alerts
        # The state itself is the replay's, with every count and text.
        assert by_name(attempt.writer.engine.alerts) == by_name(found)
        # And so is what was said on the way: one live row per alert, and one more where it became critical.
        told = {}
        for row in reader.read("health").to_pylist():
            if row["event"] == "alert":
                told.setdefault((row["rule"], row["subject"], row["since"]), []).append(row["severity"])
        expected = {(a.rule, a.subject, a.since): a.severity for a in found if not RULES[a.rule].at_once}
        assert {key: severities[-1] for key, severities in told.items()} == expected
        assert all(
            severities in (["warn"], ["critical"], ["warn", "critical"]) for severities in told.values()
        )


def test_an_alert_that_lasts_is_not_told_again_after_a_resume(tmp_path):
    heard = []
    generator = np.random.default_rng(1)
    first = Attempt(tmp_path / "run", sinks={"list": heard.append})
    for step in range(1, 12):
        first.write(step, generator, 1.0)
    first.close()
    assert {"dead_expert", "z", "loop_growth"} <= {notice.rule for notice in heard}
    before = len(heard)
    second = Attempt(tmp_path / "run", first_step=12, parent=1, sinks={"list": heard.append})
    for step in range(12, 18):
        second.write(step, generator, 1.0)
    second.close()
    assert [n.rule for n in heard[before:] if not RULES[n.rule].at_once] == []


def test_what_a_rollback_repeats_is_written_again_and_not_delivered_again(tmp_path):
    heard = []
    first = Attempt(tmp_path / "run", sinks={"list": heard.append})
    for step in range(1, 12):
        first.write(step, np.random.default_rng(step), 1.0)
    first.close()
    before = len(heard)
    # From a checkpoint before the alerts fired; the same streaks break the same bounds again.
    second = Attempt(tmp_path / "run", first_step=6, parent=1, sinks={"list": heard.append})
    for step in range(6, 12):
        second.write(step, np.random.default_rng(step), 1.0)
    second.close()
    assert [n.rule for n in heard[before:] if not RULES[n.rule].at_once] == []
    rows = RunReader(tmp_path / "run").read("health", columns=["attempt", "event"]).to_pylist()
    assert [row for row in rows if row["event"] == "alert" and row["attempt"] == 2]


def test_alerts_that_began_without_the_rules_are_told_by_the_attempt_that_has_them(tmp_path):
    first = Attempt(tmp_path / "run")
    for step in range(1, 12):
        for table, row in rows_of(step, np.random.default_rng(step), 1.0):
            first.writer._inner.append(table, row)
    first.kill()
    heard = []
    second = Attempt(tmp_path / "run", first_step=12, parent=1, sinks={"list": heard.append})
    second.write(12, np.random.default_rng(12), 1.0)
    second.close()
    told = {notice.rule: notice for notice in heard}
    assert {"dead_expert", "maxvio", "loop_growth"} <= set(told)
    assert told["maxvio"].since == SETTINGS.warmup_steps + 1
    assert told["maxvio"].num_places > 1


@QUICK
@given(
    seed=st.integers(0, 2**32 - 1),
    sick=st.sampled_from([0.1, 0.5, 0.9]),
    depths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cuts=st.sets(st.integers(2, 40)),
    bounds=st.sampled_from([SETTINGS, replace(SETTINGS, load_entropy=1.5, growth=0.9, clear_at=1.0)]),
)
def test_any_split_into_batches_gives_the_same_alerts(seed, sick, depths, cuts, bounds):
    generator = np.random.default_rng(seed)
    tables: dict[str, list[dict]] = {}
    for step in range(1, 41):
        share = 0.9 if generator.random() < sick / 2 else 0.1 * sick
        for table, row in rows_of(step, generator, share, depths[step % len(depths)]):
            tables.setdefault(table, []).append(row)
    whole, split = AlertEngine(bounds), AlertEngine(bounds)
    for table, rows in tables.items():
        whole.observe_rows(table, rows)
        for begin, end in pairwise([1, *sorted(cuts), 41]):
            split.observe_rows(table, [row for row in rows if begin <= row["step"] < end])
    assert whole.alerts == split.alerts


def test_other_ranks_rows_are_not_the_runs(tmp_path):
    root = tmp_path / "run"
    with RunStore.create(root, options=OPTIONS) as store:
        number = store.claim_attempt(first_step=1, world_size=2).attempt
        for rank in (0, 1):
            writer = store.writer(attempt=number, writer=f"r{rank:05d}")
            for step in range(1, 12):
                for table, row in rows_of(step, np.random.default_rng(step), float(rank)):
                    writer.append(table, row | {"rank": rank, "world_size": 2})
    found = {alert.rule for alert in replay.replay_run(RunReader(root), SETTINGS).alerts}
    assert not any(not RULES[rule].at_once for rule in found)
