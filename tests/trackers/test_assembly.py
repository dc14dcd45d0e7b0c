"""Rows one by one → whole steps, each value once and under its own step, however late the losses come."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loopscope.store import TABLES
from loopscope.trackers.assembly import CORE_KEYS, StepAssembler


def keys(step, scope="global", **more):
    return {"step": step, "aggregation_scope": scope, "tokens_seen": 10 * step, **more}


def router(step, scope="global", **more):
    return keys(
        step, scope, unrolled_pos=0, block="head", maxvio_count=step / 2, expert_count=[1] * 99, **more
    )


def loss(step):
    return keys(step, task_loss=float(step), total_loss=float(step))


@given(
    steps=st.integers(1, 40),
    traced=st.sets(st.integers(1, 40)),
    probed=st.sets(st.integers(0, 40)),
    late=st.integers(0, 8),
    has_losses=st.booleans(),
)
def test_every_value_once_and_under_its_step(steps, traced, probed, late, has_losses):
    assembler, waiting, given_ = StepAssembler(scope="global", attempt=2), [], []

    def see(table, row):
        given_.extend(assembler.see(table, row))

    def losses(before):
        while waiting and waiting[0] <= before:
            see("loss", loss(waiting.pop(0)))

    def probe(step):
        if step in probed:
            see("probe_loss", keys(step, stratum_kind="all", stratum="all", loss_mean=step / 4))

    probe(0)
    for step in range(1, steps + 1):
        if step in traced:
            see("router", router(step))
            see("health", keys(step, event="coverage", severity="info", value=1.0))
            losses(step - 1)  # a traced step waits for everything before it
        if has_losses:
            waiting.append(step)
        losses(step - late)
        probe(step)
    losses(steps)
    given_.extend(assembler.finish())

    scalars = [
        (made.step, key)
        for made in given_
        for key in made.scalars
        if not key.startswith(("loopscope/", "health/"))
    ]
    assert max(Counter(scalars).values(), default=1) == 1
    for made in given_:
        found = made.scalars
        assert found.get("loss/task", made.step) == made.step
        assert found.get("moe/maxvio_max", made.step / 2) == made.step / 2
        assert found.get("probe/loss", made.step / 4) == made.step / 4
        if found:
            assert found["loopscope/attempt"] == 2
            assert found.get("loopscope/tokens_seen") == 10 * made.step
    with_key = lambda key: [made.step for made in given_ if key in made.scalars]  # noqa: E731
    assert with_key("loss/task") == (list(range(1, steps + 1)) if has_losses else [])
    assert sorted(with_key("moe/maxvio_max")) == sorted(step for step in traced if step <= steps)
    assert sorted(with_key("probe/loss")) == sorted(step for step in probed if step <= steps)
    # In a training with losses a traced step is given whole.
    if has_losses:
        assert all("loss/task" in made.scalars for made in given_ if "moe/maxvio_max" in made.scalars)


def test_without_losses_a_step_waits_for_the_second_trace_after_it():
    assembler = StepAssembler(scope="global", attempt=1)
    given_ = [[made.step for made in assembler.see("router", router(step))] for step in (10, 20, 30, 40)]
    assert given_ == [[], [], [10], [20]]
    assert [made.step for made in assembler.finish()] == [30, 40]


def test_rows_of_single_ranks_do_not_count_where_rows_are_global():
    assembler = StepAssembler(scope="global", attempt=1)
    assert not list(assembler.see("router", router(1, "rank_local", rank=1)))
    assert not list(assembler.finish())


def test_tables_are_shown_on_their_schedule_and_the_last_one_at_the_end():
    assembler = StepAssembler(scope="global", attempt=1)
    made = []
    for step in range(1, 102):
        made += assembler.see("router", router(step))
        made += assembler.see("loss", loss(step))
    made += assembler.finish()
    shown = [each.step for each in made if each.show_table]
    assert shown[:5] == [1, 2, 3, 4, 5]
    assert shown[-1] == 101
    assert len(shown) < 20
    assert made[-1].scalars == {}


def test_events_and_lost_rows_are_counted_up():
    assembler = StepAssembler(scope="global", attempt=1)
    for severity in ("warn", "critical", "info"):
        list(assembler.see("health", keys(1, event="x", severity=severity)))
    list(assembler.see("health", keys(1, event="error", severity="critical")))
    (made,) = assembler.see("loss", loss(1), dropped=4)
    assert made.scalars["health/events"] == 3
    assert made.scalars["health/dropped"] == 5


def test_only_what_is_needed_is_held():
    assembler = StepAssembler(scope="global", attempt=1)
    list(assembler.see("router", router(1)))
    (held,) = assembler._steps[1].tables["router"]
    assert "expert_count" not in held


def test_every_scalar_of_a_trace_reaches_the_tracker():
    assembler = StepAssembler(scope="global", attempt=1)
    number = dict.fromkeys((column.name for table in TABLES.values() for column in table.columns), 0.5)
    place = {"block": "loop", "unrolled_pos": 3, "loop_step": 1, "layer_idx": 0}
    pair = {"kind": "step_boundary", "from_pos": 2, "to_pos": 3}
    for table, named in (("router", place), ("residual", place), ("transition", pair)):
        list(assembler.see(table, number | keys(4) | named | {"expert_count": [1, 1]}))
    (made,) = [step for step in assembler.finish() if step.scalars]
    wanted = {key for key in CORE_KEYS if key.startswith(("moe/", "loop/"))} - {"moe/lb_loss", "moe/z_loss"}
    assert wanted <= set(made.scalars)
