from __future__ import annotations

from loopscope.capture.execution import ExecutionRecord


def outcomes(record: ExecutionRecord) -> list[tuple[str, int, str]]:
    return [(call.module, call.depth, call.outcome) for call in record.calls]


def test_calls_stand_in_order_with_their_depth() -> None:
    record = ExecutionRecord()
    record.enter("layer")
    record.enter("layer.router")
    assert record.is_running("layer")
    assert record.leave("layer.router")
    assert record.leave("layer")
    assert outcomes(record) == [("layer", 0, "forward"), ("layer.router", 1, "forward")]
    assert record.forwards(["layer", "layer.router"]) == ["layer.router", "layer"]
    assert not record.is_running("layer")


def test_a_failed_call_and_a_recompute_are_no_forwards() -> None:
    record = ExecutionRecord()
    record.enter("layer")
    assert not record.leave("layer", failed=True)
    record.enter("layer")
    assert record.leave("layer")
    record.enter("layer", in_backward=True)
    assert not record.leave("layer")
    assert [outcome for *_, outcome in outcomes(record)] == ["failed", "forward", "recompute"]
    assert record.forwards(["layer"]) == ["layer"]


def test_what_an_exception_cut_off_is_failed() -> None:
    record = ExecutionRecord()
    record.enter("layer")
    record.enter("layer.router")
    assert not record.leave("layer", failed=True)
    assert outcomes(record) == [("layer", 0, "failed"), ("layer.router", 1, "failed")]
    record.enter("layer")
    assert outcomes(record)[-1] == ("layer", 0, "running")


def test_a_call_that_never_began_ends_nothing() -> None:
    assert not ExecutionRecord().leave("layer")
