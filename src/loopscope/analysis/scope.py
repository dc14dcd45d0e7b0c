"""Which rows of a table speak for a run, as an SQL condition and in words."""

from dataclasses import dataclass

from loopscope.analysis.run import Run
from loopscope.catalog.rows import speaking_sql


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """A choice of rows."""

    where: str
    """An SQL condition over the table."""
    words: str
    """"global", "rank-local (the only rank)", "rank-local: rank 0 of 8", or what holds at which steps."""
    note: str = ""
    """The words after a comma, for a title; empty where they go without saying."""


def scope_of(run: Run, table: str) -> Scope:
    """The rows of `table` that stand for the run (`catalog.rows.speaking`); rows of different scopes never mix."""
    query = (
        "select bool_or(whole), not bool_and(whole), min(lowest), max(ranks), max(world) from (select "
        "coalesce(bool_or(aggregation_scope = 'global'), false) as whole, "
        "min(rank) filter (aggregation_scope is distinct from 'global') as lowest, "
        f"count(distinct rank) as ranks, max(world_size) as world from {table} group by step)"
    )
    any_global, any_local, rank, ranks, world = run.sql(query).fetchall()[0]
    where = speaking_sql(table, any_global=any_global, any_local=any_local, lowest=rank)
    words = "no scope recorded"
    if rank is not None:
        is_only = ranks == 1 and (world or 1) == 1
        words = "rank-local (the only rank)" if is_only else f"rank-local: rank {rank} of {world or ranks}"
    if any_global:
        words = f"global, where a step has no global row {words}" if any_local else "global"
    says_more = words.startswith(("rank-local:", "global,"))
    return Scope(where=where, words=words, note=f", {words}" if says_more else "")
