"""The losses of a step, against a direct computation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, RowContext
from loopscope.integrations.torchtitan.objective import AuxScale, StepLosses, device_loss


def ranks(rng_seed, num_ranks, num_microbatches, targets):
    """StepLosses of every rank of one step, and the plain numbers they were made from."""
    gen = torch.Generator().manual_seed(rng_seed)
    scale = AuxScale(lb_factor=0.01, z_factor=0.001, num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_global = sum(sum(row) for row in targets)
    made = []
    for row in targets:
        step = StepLosses(global_targets=torch.tensor(num_global))
        numbers = []
        for count in row:
            task_sum, lb, z = (torch.rand((), generator=gen, dtype=torch.float64) + 1 for _ in range(3))
            task_sum = task_sum * count
            task = task_sum / num_global
            step.task.append(task)
            step.lb.append(lb)
            step.z.append(z)
            step.objective.append(scale.add(task, lb, z))
            step.targets.append(torch.tensor(count))
            numbers.append((task_sum.item(), lb.item(), z.item()))
        made.append((step, numbers))
    return scale, num_global, made


@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 4),
    data=st.data(),
)
def test_shares_of_unequal_ranks_add_up_to_the_objective(seed, num_ranks, num_microbatches, data):
    counts = st.lists(st.integers(1, 50), min_size=num_microbatches, max_size=num_microbatches)
    targets = data.draw(st.lists(counts, min_size=num_ranks, max_size=num_ranks))
    scale, num_global, made = ranks(seed, num_ranks, num_microbatches, targets)
    shares = [device_loss(step, scale, grad_norm=None, lr=None) for step, _ in made]
    for share, (_, numbers), row in zip(shares, made, targets, strict=True):
        assert share.task_loss_sum.item() == pytest.approx(sum(n[0] for n in numbers))
        assert share.lb_loss.item() == pytest.approx(sum(n[1] for n in numbers) / len(numbers))
        assert share.z_loss.item() == pytest.approx(sum(n[2] for n in numbers) / len(numbers))
        assert share.num_target_tokens.item() == sum(row)
    # What all ranks ran backward on, summed, is the objective of the joined batch.
    numbers = [n for _, rank in made for n in rank]
    task = sum(n[0] for n in numbers) / num_global
    lb, z = (sum(n[i] for n in numbers) / len(numbers) for i in (1, 2))
    assert sum(share.total_loss.item() for share in shares) == pytest.approx(task + 0.01 * lb + 0.001 * z)


def test_an_auxiliary_loss_that_was_added_twice_shows_in_the_total():
    scale, _, [(step, numbers)] = ranks(0, 1, 1, [[10]])
    step.objective = [step.objective[0] + 0.01 * step.lb[0]]
    share = device_loss(step, scale, grad_norm=None, lr=None)
    task_sum, lb, z = numbers[0]
    closure = share.total_loss.item() - (task_sum / 10 + 0.01 * lb + 0.001 * z)
    assert closure == pytest.approx(0.01 * lb)


def test_the_collector_closes_what_this_hands_over():
    scale, _, [(step, _)] = ranks(3, 1, 4, [[10, 7, 1, 20]])
    writer = MemoryWriter()
    collector = ParquetCollector(writer, context=RowContext(run_id="r"), expected_visits=())
    norm = torch.tensor(2.5)
    collector.submit_loss(1, device_loss(step, scale, grad_norm=norm, lr=0.1), wait=True)
    [row] = writer.rows("loss")
    assert abs(row["closure_error"]) < 1e-9
    assert (row["grad_norm"], row["lr"], row["num_target_tokens"]) == (2.5, 0.1, 38)
    assert row["lb_loss_factor"] == 0.01
