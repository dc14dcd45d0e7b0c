from collect_helpers import meta, sink, specs

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, RowContext


class Counting(MemoryWriter):
    """Counts the calls that a writer gets."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def append_many(self, table, rows):
        self.calls.append(table)
        super().append_many(table, rows)


def collector(writer):
    return ParquetCollector(writer, context=RowContext(run_id="r"), expected_visits=specs())


def test_a_traced_step_is_one_call_per_table():
    writer = Counting()
    collector(writer).on_trace_step(1, sink(), meta())
    assert sorted(writer.calls) == ["health", "residual", "router", "transition"]
    assert len(writer.tables["router"]) == 8


def test_no_rows_are_no_call():
    writer = Counting()
    made = collector(writer)
    made.record_rows(1, {"probe_margin": []})
    assert writer.calls == []
