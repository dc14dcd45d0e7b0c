"""Which rows of a table speak for the run: global ones where there are any, else one rank's."""

from __future__ import annotations

from dataclasses import dataclass

from loopscope.analysis.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """A choice of rows, as an SQL condition and in words."""

    where: str
    words: str
    """"global", "rank-local (the only rank)" or "rank-local: rank 0 of 8"."""


def scope_of(run: Run, table: str) -> Scope:
    """The rows of `table` that stand for the run; rows of different scopes never mix."""
    query = (
        "select bool_or(aggregation_scope = 'global'), min(rank), count(distinct rank), max(world_size) "
        f"from {table}"
    )
    any_global, rank, ranks, world = run.sql(query).fetchall()[0]
    if any_global:
        return Scope(where="aggregation_scope = 'global'", words="global")
    if rank is None:
        return Scope(where="true", words="no scope recorded")
    if ranks == 1 and (world or 1) == 1:
        return Scope(where="true", words="rank-local (the only rank)")
    return Scope(where=f"rank = {rank}", words=f"rank-local: rank {rank} of {world or ranks}")
