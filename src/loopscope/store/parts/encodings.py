"""How each column of a part is encoded and compressed, judged by its first rows.

A dictionary and zstd serve columns whose values repeat. Measured values of full precision repeat nowhere and hardly
compress: there a dictionary costs a fifth of the bytes and both cost every reader half of its time.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_SAMPLE = 4096
_REPEATS = 0.5
"""A column whose distinct values are less than this share of its values repeats itself."""
_SAVES = 0.15
"""Compression that saves a smaller share is not worth its undoing."""
_CODEC = "zstd"


def parquet_options(schema: pa.Schema, first: pa.Table) -> dict[str, Any]:
    """Keyword arguments `use_dictionary` and `compression` for a Parquet writer.

    Args:
        schema: of the file.
        first: its first rows.
    """
    dictionary: list[str] = []
    compression: dict[str, str] = {}
    for field in schema:
        path = f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        repeats, saves = _judge(first[field.name].slice(0, _SAMPLE))
        if repeats:
            dictionary.append(path)
        compression[path] = _CODEC if repeats or saves else "none"
    return {"use_dictionary": dictionary, "compression": compression}


def _judge(column: pa.ChunkedArray) -> tuple[bool, bool]:
    """(values repeat, compression saves something). Anything but floats is taken to do both."""
    kind = column.type
    values = pc.list_flatten(column) if pa.types.is_list(kind) else column
    if not pa.types.is_floating(values.type):
        return True, True
    values = values.drop_null().slice(0, _SAMPLE).combine_chunks()
    if not len(values) or pc.count_distinct(values).as_py() < _REPEATS * len(values):
        return True, True
    raw = values.to_numpy(zero_copy_only=False).tobytes()
    return False, len(pa.Codec(_CODEC).compress(raw)) < (1 - _SAVES) * len(raw)
