"""Steps and microbatches from what happens in a training loop, against loops whose steps are known."""

from hypothesis import given
from hypothesis import strategies as st

from loopscope.session.step_count import StepCount


class Loop:
    """Hears of steps, and notes the microbatches of each."""

    def __init__(self, num_microbatches=None, first_step=1):
        self.began, self.closed, self.seen = [], [], []
        self.count = StepCount(
            first_step,
            num_microbatches,
            started=self.began.append,
            ended=lambda step, saw: self.closed.append((step, saw)),
        )

    def forward(self, fails=0):
        """One microbatch; it fails some times, and is tried again."""
        for _ in range(fails):
            if self.count.forward():
                self.count.failed()
        if self.count.forward():
            self.seen.append((self.count.step, self.count.microbatch))
            self.count.done()


groups = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6)
"""Steps → their microbatches → how often each fails before it works."""


def right(steps, first_step=1):
    return [
        (step, microbatch) for step, group in enumerate(steps, first_step) for microbatch in range(len(group))
    ]


@given(groups, st.integers(1, 9), st.integers(1, 3))
def test_an_update_ends_a_step_whatever_its_size(steps, first_step, optimizers):
    loop = Loop(first_step=first_step)
    for group in steps:
        for fails in group:
            loop.forward(fails)
        for number in range(optimizers):
            loop.count.updated(leads=number == 0)
    assert loop.seen == right(steps, first_step)
    numbers = list(range(first_step, first_step + len(steps)))
    assert loop.began == numbers
    assert loop.closed == [(number, True) for number in numbers]


@given(groups, st.booleans())
def test_steps_by_hand_are_those_that_were_said(steps, ends):
    loop = Loop()
    for number, group in enumerate(steps, 1):
        loop.count.begin(10 * number, None)
        for fails in group:
            loop.forward(fails)
        if ends:
            loop.count.end()
            loop.forward()  # to log something: no step's
    loop.count.end()
    assert loop.seen == [(10 * step, microbatch) for step, microbatch in right(steps)]
    assert loop.closed == [(10 * number, True) for number in range(1, len(steps) + 1)]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_counted_forwards_make_steps(per_step, num_steps, data):
    loop = Loop(per_step)
    for _ in range(per_step * num_steps):
        loop.forward(data.draw(st.integers(0, 2)))
    assert loop.seen == right([[0] * per_step] * num_steps)
    assert [step for step, _ in loop.closed] == list(range(1, num_steps + 1))


def test_an_update_ends_a_group_that_is_shorter_than_the_count():
    loop = Loop(4)
    for _ in range(6):
        loop.forward()
    loop.count.updated()
    loop.forward()
    assert loop.seen == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0)]


def test_an_update_without_a_forward_is_a_step_that_saw_none():
    loop = Loop()
    loop.count.updated()
    loop.count.updated(leads=False)
    loop.forward()
    loop.count.updated()
    assert loop.closed == [(1, False), (2, True)]
    loop.count.end()
    assert len(loop.closed) == 2


def test_forwards_beyond_a_count_by_hand_belong_to_no_step():
    loop = Loop()
    loop.count.begin(3, 2)
    for _ in range(4):
        loop.forward()
    assert loop.seen == [(3, 0), (3, 1)]
    assert not loop.count.forward()
