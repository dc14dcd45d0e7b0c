from collect_helpers import meta, sink, specs

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, RowContext
from loopscope.collect.writer import append_rows


class Counting(MemoryWriter):
    """Counts the calls that a writer gets."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def append_many(self, table, rows):
        self.calls.append(table)
        super().append_many(table, rows)


class OneByOne:
    """A writer of the narrow kind, which takes one row at a time."""

    dropped = 0

    def __init__(self):
        self.rows = []

    def append(self, table, row):
        self.rows.append((table, row))


def collector(writer):
    return ParquetCollector(writer, context=RowContext(run_id="r"), expected_visits=specs())


def test_a_traced_step_is_one_call_per_table():
    writer = Counting()
    collector(writer).on_trace_step(1, sink(), meta())
    assert sorted(writer.calls) == ["health", "residual", "router", "transition"]
    assert len(writer.tables["router"]) == 8


def test_a_writer_that_takes_one_row_at_a_time_gets_the_same_rows():
    many, one = MemoryWriter(), OneByOne()
    for writer in (many, one):
        collector(writer).on_trace_step(1, sink(), meta())
    found = {table: [row for t, row in one.rows if t == table] for table in many.tables}
    for table, rows in many.tables.items():
        timed = ("elapsed_s", "wall_time", "value", "detail")
        strip = [{k: v for k, v in row.items() if k not in timed} for row in rows]
        assert [{k: v for k, v in row.items() if k not in timed} for row in found[table]] == strip


def test_no_rows_are_no_call():
    writer = Counting()
    made = collector(writer)
    made.record_rows(1, {"probe_margin": []})
    assert writer.calls == []
    append_rows(writer, "loss", [{"step": 1}])
    assert writer.calls == ["loss"]
