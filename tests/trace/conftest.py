import pytest

from loopscope.trace import ACTIVE_TRACE_SINK


@pytest.fixture(autouse=True)
def _disarmed_sink():
    """No test leaves the process-wide sink armed for the next one."""
    yield
    ACTIVE_TRACE_SINK.disarm()
