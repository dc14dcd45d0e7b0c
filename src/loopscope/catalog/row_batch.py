"""Rows of one table as the alert rules read them: columns of arrays, over any number of whole steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopscope.catalog.gauge import as_floats
from loopscope.catalog.rows import VISIT, visit_index, visit_label, visit_labels

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

FEW = 512
"""Rows that are looked at one by one sooner than sorted out in arrays."""

PAIR = ("kind", "to_layer_idx", "to_loop_step")
"""What `RowBatch.boundaries` is made from."""

_SHIFT, _WIDTH = 48, 24


class Subjects(NamedTuple):
    """What the rows of a batch are about."""

    code: Ints
    """[n] number of each one's subject, from 0."""
    names: Sequence[str]
    """The subjects by number: names that are the same in every batch."""


class StepBoundaries(NamedTuple):
    """The step boundaries of a batch, layer by layer within each step: one group is one layer at one step."""

    row: Ints
    """[n] rows of the batch in that order, and in the loop's within a group."""
    begins: Ints
    """[groups] the first of each group, as an index into `row`."""
    ends: Ints
    """[groups] one past its last."""
    layer: Ints
    """[groups]"""
    loop_step: Ints
    """[groups] where the loop ends."""


class RowBatch:
    """Rows of one table that speak for the run, in the order of their steps; health rows in that of their writing.

    Args:
        table: the table.
        column: name → that column [n]; a number is None or NaN where it is null. Asked for at most once each.
    """

    def __init__(self, table: str, column: Callable[[str], Sequence[Any] | NDArray[Any]]) -> None:
        self.table, self._column = table, column
        self._columns: dict[str, Sequence[Any] | NDArray[Any]] = {}
        self._floats: dict[str, Floats] = {}
        self.step: Ints = np.asarray(self.column("step"), dtype=np.int64)

    def column(self, name: str) -> Any:
        """A column [n] as it was given."""
        if name not in self._columns:
            self._columns[name] = self._column(name)
        return self._columns[name]

    def floats(self, name: str) -> Floats:
        """A column of numbers as float64 [n], NaN where it is null or not finite."""
        if name not in self._floats:
            self._floats[name] = as_floats(self.column(name))
        return self._floats[name]

    def ints(self, name: str) -> Ints:
        """A column of whole numbers as int64 [n], -1 where it is null."""
        found = self.floats(name)
        return np.where(np.isnan(found), -1.0, found).astype(np.int64)

    def objects(self, name: str) -> NDArray[Any]:
        """A column of texts as an array of objects [n]."""
        return np.asarray(self.column(name), dtype=object)

    def after(self, step: int) -> RowBatch:
        """The rows of later steps."""
        first = int(np.searchsorted(self.step, step, side="right"))
        return RowBatch(self.table, lambda name: self.column(name)[first:]) if first else self

    @cached_property
    def visits(self) -> Subjects:
        """The visits of a table that has a row per visit."""
        columns = {"step": self.step, **{name: self.column(name) for name in VISIT}}
        if isinstance(columns["loop_step"], list):  # rows that were dictionaries are few
            labels = visit_labels(columns)
            number = {label: code for code, label in enumerate(dict.fromkeys(labels))}
            return Subjects(np.array([number[label] for label in labels]), list(number))
        block, loop_step, layer = self.objects("block"), self.ints("loop_step"), self.ints("layer_idx")
        in_loop = block == "loop"
        place = np.where(in_loop, loop_step, visit_index(columns))
        key = (place << _WIDTH) + np.where(in_loop, layer, 0)
        for kind, name in enumerate(dict.fromkeys(block.tolist())):
            key[block == name] += kind << _SHIFT
        _, first, code = np.unique(key, return_index=True, return_inverse=True)
        names = [
            visit_label(*visit)
            for visit in zip(
                *(values[first].tolist() for values in (block, loop_step, layer, place)), strict=True
            )
        ]
        return Subjects(code, names)

    @cached_property
    def boundaries(self) -> StepBoundaries:
        """The step boundaries of the table `transition`."""
        row = np.flatnonzero(self.objects("kind") == "step_boundary")
        layer, loop_step, step = (
            self.ints("to_layer_idx")[row],
            self.ints("to_loop_step")[row],
            self.step[row],
        )
        order = np.lexsort((loop_step, layer, step))
        row, layer, loop_step, step = row[order], layer[order], loop_step[order], step[order]
        begins = np.flatnonzero(firsts(step, layer))
        ends = np.append(begins[1:], len(row)) if len(row) else begins
        return StepBoundaries(row, begins, ends, layer[begins], loop_step[ends - 1])


def firsts(*keys: Ints) -> Flags:
    """[n] True where a sorted row's keys differ from those of the row before it."""
    found = np.ones(len(keys[0]), dtype=np.bool_)
    found[1:] = False
    for key in keys:
        found[1:] |= key[1:] != key[:-1]
    return found


def relevant(subjects: Subjects, broken: Flags, kept: Flags, opened: Container[str]) -> Ints:
    """The rows that can change what is known of their subject: each broken one, and the first kept one after it.

    Most rows of most runs are neither, and nobody need look at them one by one.

    Args:
        subjects: of the rows, [n].
        broken: [n] rows that break their bound.
        kept: [n] rows that end what a broken row began; a row that is neither changes nothing.
        opened: subjects of which a broken row before these is not ended yet.

    Returns:
        Indices, rising; of few rows, more than need be.
    """
    is_open = np.array([name in opened for name in subjects.names], dtype=np.bool_)
    touched = is_open.copy()
    touched[subjects.code[broken]] = True
    mine = np.flatnonzero((broken | kept) & touched[subjects.code])
    if len(mine) <= FEW:
        return mine
    order = mine[np.argsort(subjects.code[mine], kind="stable")]
    code, bad = subjects.code[order], broken[order]
    before = np.where(firsts(code), is_open[code], np.roll(bad, 1))
    return np.sort(order[bad | before])
