import math
import weakref

import pytest
import torch
from collect_helpers import specs
from rank_helpers import ranks
from torch.multiprocessing.reductions import StorageWeakRef

from loopscope import ParquetCollector
from loopscope.collect import DeviceLoss, MemoryWriter, RowContext
from loopscope.collect.pending_losses import CAPACITY, PendingLosses
from loopscope.errors import TraceError


def device_loss(task_sum=20.0, targets=10, *, lb=1.5, z=4.0, total=2.019, **other):
    scalars = {name: torch.tensor(value) for name, value in other.items() if name != "lr"}
    return DeviceLoss(
        task_loss_sum=torch.tensor(task_sum),
        num_target_tokens=torch.tensor(targets),
        lb_loss=torch.tensor(lb),
        z_loss=torch.tensor(z),
        total_loss=torch.tensor(total, dtype=torch.float64),
        lb_loss_factor=0.01,
        z_loss_factor=0.001,
        lr=other.get("lr"),
        **scalars,
    )


def alone():
    writer = MemoryWriter()
    return writer, ParquetCollector(
        writer, context=RowContext(run_id="r"), expected_visits=specs(), on_error="raise"
    )


class Slow:
    """A reduction that takes until somebody waits for it."""

    def __init__(self):
        self.done = False

    def is_completed(self):
        return self.done

    def wait(self):
        self.done = True


class SlowReducer:
    device, num_ranks, is_writer = torch.device("cpu"), 1, True

    def __init__(self):
        self.pending = []

    def start_sum(self, buffer):
        self.pending.append(Slow())
        return self.pending[-1]


def test_row_of_one_rank():
    writer, made = alone()
    made.begin_step(1, tokens_seen=10)
    headline = made.submit_loss(1, device_loss(grad_norm=0.5, lr=1e-3))
    (row,) = writer.tables["loss"]
    assert (row["task_loss"], row["task_loss_sum"], row["num_target_tokens"]) == (2.0, 20.0, 10)
    assert (row["grad_norm"], row["lr"], row["other_loss"]) == (0.5, 1e-3, None)
    assert row["closure_error"] == pytest.approx(0.0, abs=1e-9)
    assert headline["loss/task"] == 2.0
    assert row["tokens_seen"] == 10


def test_global_loss_is_a_ratio_of_sums_and_the_objective_a_sum():
    """Ranks with 10 and 30 targets: ΣΣ task, mean lb and z, and a total that closes."""
    writer, made, reducers = ranks(2)
    shares = [20.0 / 40 + (0.01 * 1.0 + 0.001 * 2.0) / 2, 90.0 / 40 + (0.01 * 2.0 + 0.001 * 6.0) / 2]
    made[1].submit_loss(1, device_loss(90.0, 30, lb=2.0, z=6.0, total=shares[1], grad_norm=0.5))
    made[0].submit_loss(1, device_loss(20.0, 10, lb=1.0, z=2.0, total=shares[0], grad_norm=0.5))
    (row,) = writer.tables["loss"]
    assert row["task_loss"] == pytest.approx(110 / 40)
    assert (row["lb_loss"], row["z_loss"], row["grad_norm"]) == (1.5, 4.0, 0.5)
    assert row["num_target_tokens"] == 40
    assert row["closure_error"] == pytest.approx(0.0, abs=1e-6)
    assert (row["rank"], row["aggregation_scope"]) == (None, "global")
    assert [name for name, _ in reducers[0].calls] == ["start_sum"]


def test_rows_come_late_in_order_and_never_more_than_the_capacity_wait():
    reducer = SlowReducer()
    ring = PendingLosses(reducer)
    arrived = []
    for step in range(1, CAPACITY + 4):
        ring.submit(step, device_loss())
        arrived += [found.step for found in ring.drain()]
        assert len(ring) <= CAPACITY
    assert arrived == [1, 2, 3]
    reducer.pending[4].done = True  # step 5 is there, step 4 is not: order is kept
    assert list(ring.drain()) == []
    arrived += [found.step for found in ring.drain(block=True)]
    assert arrived == list(range(1, CAPACITY + 4))


def test_flush_and_close_wait_for_what_is_under_way():
    for finish in ("flush", "close"):
        writer = MemoryWriter()
        made = ParquetCollector(
            writer, context=RowContext(run_id="r"), expected_visits=specs(), reducer=SlowReducer()
        )
        assert made.submit_loss(1, device_loss()) == {}
        assert "loss" not in writer.tables
        getattr(made, finish)()
        assert [row["step"] for row in writer.tables["loss"]] == [1]


def test_no_target_is_null_not_zero():
    writer, made = alone()
    made.submit_loss(1, device_loss(0.0, 0))
    row = writer.tables["loss"][0]
    assert row["task_loss"] is None
    assert (row["task_loss_sum"], row["num_target_tokens"]) == (0.0, 0)


def test_non_finite_and_other_terms():
    writer, made, _ = ranks(2)
    made[1].submit_loss(1, device_loss(math.nan, other_loss=0.5))
    made[0].submit_loss(1, device_loss(1.0, other_loss=0.25))
    row = writer.tables["loss"][0]
    assert row["task_loss"] is None
    assert row["nonfinite_fields"] == "task_loss,task_loss_sum"
    assert row["other_loss"] == 0.375


def test_order_is_checked():
    _, made = alone()
    made.submit_loss(2, device_loss())
    with pytest.raises(TraceError, match="got step 2 after step 2"):
        made.submit_loss(2, device_loss())


def test_nothing_of_the_trainer_is_held():
    ring = PendingLosses(SlowReducer())
    loss = device_loss(grad_norm=0.5)
    scalars = [loss.task_loss_sum, loss.total_loss, loss.grad_norm]
    objects = [weakref.ref(scalar) for scalar in scalars]
    storages = [StorageWeakRef(scalar.untyped_storage()) for scalar in scalars]
    ring.submit(1, loss)
    del loss, scalars
    assert len(ring) == 1
    assert all(ref() is None for ref in objects)
    assert all(ref.expired() for ref in storages)
