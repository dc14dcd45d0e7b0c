import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.errors import ConfigError
from loopscope.trackers import KEY_LIMIT, KeyBudget
from loopscope.trackers.assembly import CORE_KEYS
from loopscope.trackers.backends import tensorboard, wandb
from loopscope.trackers.registry import OF_THE_TRAINER


@given(
    st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers()), max_size=30),
    st.integers(3, 9),
)
def test_no_more_keys_than_the_limit_ever_and_none_that_had_a_place_loses_it(steps, limit):
    budget, seen = KeyBudget(limit, ["a", "b", "c"]), set()
    for values in steps:
        admitted = budget.admit(values)
        assert admitted.items() <= values.items()
        assert values.keys() & (seen | {"a", "b", "c"}) <= admitted.keys()
        seen |= admitted.keys()
        assert set(values) - set(admitted) <= set(budget.refused)
    assert len(seen | {"a", "b", "c"}) <= limit
    assert not seen & set(budget.refused)


def test_reserved_keys_find_their_place_whoever_came_first():
    budget = KeyBudget(3, ["loss/task"])
    assert set(budget.admit({f"custom/{i}": i for i in range(10)})) == {"custom/0", "custom/1"}
    assert budget.admit({"loss/task": 1.0}) == {"loss/task": 1.0}
    assert len(budget.refused) == 8


def test_more_reserved_keys_than_the_limit_are_an_error():
    with pytest.raises(ConfigError, match="2 are reserved; expected at most 1"):
        KeyBudget(1, ["a", "b"])


def test_the_refused_are_remembered_only_so_far():
    budget = KeyBudget(1)
    for i in range(3000):
        budget.admit({f"k{i}": 0})
    assert len(budget.refused) == 1000


@pytest.mark.parametrize("own", [wandb.WandbTracker.own_keys, tensorboard.TensorBoardTracker.own_keys])
def test_what_is_always_there_fits_also_beside_the_trainers_keys(own):
    # Room is left for metrics of the user's own.
    assert len({*CORE_KEYS, *own}) <= KEY_LIMIT - OF_THE_TRAINER
