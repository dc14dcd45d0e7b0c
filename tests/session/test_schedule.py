from hypothesis import given
from hypothesis import strategies as st

from loopscope.session.schedule import is_probe_step, is_trace_step, probe_stretch


def test_trace_steps_of_every_100():
    traced = [step for step in range(1, 1030) if is_trace_step(step, every=100, last_step=1029)]
    hundreds = range(100, 1001, 100)
    assert traced == sorted({*range(1, 11), 16, 32, 64, 128, 256, 512, *hundreds, 1029})


def test_probe_steps():
    assert [s for s in range(44) if is_probe_step(s, every=20, last_step=43)] == [0, 20, 40, 43]


@given(step=st.integers(0, 10_000), last=st.integers(0, 10_000))
def test_zero_turns_off(step, last):
    assert not is_trace_step(step, every=0, last_step=last)
    assert not is_probe_step(step, every=0, last_step=last)


def test_probes_are_stretched_to_their_share_and_not_in_a_runs_first_minutes():
    assert probe_stretch(6.0, 600.0) == 1
    assert probe_stretch(6.1, 600.0) == 2
    assert probe_stretch(50.0, 1000.0) == 5
    assert probe_stretch(500.0, 599.0) == 1
