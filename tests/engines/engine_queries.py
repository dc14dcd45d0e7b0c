"""The same questions in four engines. Each takes Parquet files and gives sorted tuples.

Sources are folders with `router` and `attempt` in them. With `join`, rows are made live by the one join with the
attempt table; a compacted dataset needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[tuple[Any, ...]]
Answers = dict[str, Rows]

_LIVE_SQL = """
select r.* from {router} r join {attempt} a on r.run_id = a.run_id and r.attempt = a.attempt
where a.live_from <= r.step and (a.live_to is null or r.step < a.live_to)
"""

_QUERIES = {
    "entropy_per_loop_step": """
        select run_id, loop_step, cast(floor(step / 10) as bigint) as bucket, count(*) as n,
               avg(token_entropy_mean) as mean
        from live group by 1, 2, 3 order by 1, 2, 3""",
    "worst_rank_per_step": """
        select run_id, step, max(maxvio_count) as worst, count(*) as n from live group by 1, 2 order by 1, 2""",
    "difference_of_two_runs": """
        select x.step, x.unrolled_pos, x.n, y.n, x.mean - y.mean as difference from
        (select step, unrolled_pos, count(*) as n, avg(token_entropy_mean) as mean from live
         where run_id = '{first}' group by 1, 2) x
        join (select step, unrolled_pos, count(*) as n, avg(token_entropy_mean) as mean from live
         where run_id = '{second}' group by 1, 2) y
        on x.step = y.step and x.unrolled_pos = y.unrolled_pos order by 1, 2""",
    "added_column": "select run_id, count(later), count(*), avg(later) from live group by 1 order by 1",
}
_ASSIGNMENTS = "select run_id, sum({list_sum}) from live group by 1 order by 1"


def _sql(run_ids: tuple[str, str], list_sum: str) -> dict[str, str]:
    first, second = run_ids
    queries = {
        name: text.replace("{first}", first).replace("{second}", second) for name, text in _QUERIES.items()
    }
    return {**queries, "assignments": _ASSIGNMENTS.format(list_sum=list_sum)}


def files(folders: list[Path], table: str) -> list[str]:
    return [str(p) for folder in folders for p in sorted((folder / table).glob("*.parquet"))]


def ask_duckdb(folders: list[Path], run_ids: tuple[str, str], *, join: bool) -> Answers:
    import duckdb

    con = duckdb.connect()
    con.execute("set threads = 2")
    for table in ("router", "attempt"):
        names = ", ".join("'" + f.replace("'", "''") + "'" for f in files(folders, table))
        con.execute(f"create view {table} as select * from read_parquet([{names}], union_by_name = true)")
    con.execute(
        "create view live as "
        + (_LIVE_SQL.format(router="router", attempt="attempt") if join else "from router")
    )
    return {name: con.sql(q).fetchall() for name, q in _sql(run_ids, "list_sum(expert_count)").items()}


def ask_spark(folders: list[Path], run_ids: tuple[str, str], *, join: bool, session: Any) -> Answers:
    for table in ("router", "attempt"):
        frame = session.read.option("mergeSchema", "true").parquet(*[str(f / table) for f in folders])
        frame.createOrReplaceTempView(table)
    live = session.sql(
        _LIVE_SQL.format(router="router", attempt="attempt") if join else "select * from router"
    )
    live.createOrReplaceTempView("live")
    list_sum = "aggregate(expert_count, cast(0 as bigint), (a, x) -> a + x)"
    return {name: [tuple(r) for r in session.sql(q).collect()] for name, q in _sql(run_ids, list_sum).items()}


def ask_polars(folders: list[Path], run_ids: tuple[str, str], *, join: bool) -> Answers:
    import polars as pl

    router = pl.concat([pl.scan_parquet(f, glob=False) for f in files(folders, "router")], how="diagonal")
    if join:
        attempt = pl.concat([pl.scan_parquet(f, glob=False) for f in files(folders, "attempt")])
        live = router.join(
            attempt.select("run_id", "attempt", "live_from", "live_to"), on=["run_id", "attempt"]
        ).filter(
            (pl.col("live_from") <= pl.col("step"))
            & (pl.col("live_to").is_null() | (pl.col("step") < pl.col("live_to")))
        )
    else:
        live = router
    mean = pl.col("token_entropy_mean").mean()
    sides = [
        live.filter(pl.col("run_id") == r)
        .group_by("step", "unrolled_pos")
        .agg(pl.len().alias("n"), mean.alias("mean"))
        for r in run_ids
    ]
    frames = {
        "entropy_per_loop_step": live.group_by(
            "run_id", "loop_step", (pl.col("step") // 10).alias("bucket")
        ).agg(pl.len(), mean),
        "worst_rank_per_step": live.group_by("run_id", "step").agg(pl.col("maxvio_count").max(), pl.len()),
        "difference_of_two_runs": sides[0]
        .join(sides[1], on=["step", "unrolled_pos"])
        .select("step", "unrolled_pos", "n", "n_right", pl.col("mean") - pl.col("mean_right")),
        "added_column": live.group_by("run_id").agg(
            pl.col("later").count(), pl.len(), pl.col("later").mean().alias("mean")
        ),
        "assignments": live.group_by("run_id").agg(pl.col("expert_count").list.sum().sum()),
    }
    return {name: sorted(frame.collect().rows()) for name, frame in frames.items()}


def ask_daft(folders: list[Path], run_ids: tuple[str, str], *, join: bool) -> Answers:
    import daft
    from daft import col

    # Daft takes the first file's schema: naming the newest file first keeps the later column.
    names = files(folders, "router")
    live = daft.read_parquet(sorted(names, key=lambda n: "part-00002" not in n))
    if join:
        attempt = daft.read_parquet(files(folders, "attempt")).select(
            "run_id", "attempt", "live_from", "live_to"
        )
        live = live.join(attempt, on=["run_id", "attempt"]).where(
            (col("live_from") <= col("step")) & (col("live_to").is_null() | (col("step") < col("live_to")))
        )
    mean = col("token_entropy_mean").mean()
    sides = [
        live.where(col("run_id") == r)
        .groupby("step", "unrolled_pos")
        .agg(col("rank").count().alias(f"n{i}"), mean.alias(f"mean{i}"))
        for i, r in enumerate(run_ids)
    ]
    frames = {
        "entropy_per_loop_step": live.with_column(
            "bucket", (col("step") / 10).floor().cast(daft.DataType.int64())
        )
        .groupby("run_id", "loop_step", "bucket")
        .agg(col("step").count(), mean),
        "worst_rank_per_step": live.groupby("run_id", "step").agg(
            col("maxvio_count").max(), col("rank").count()
        ),
        "difference_of_two_runs": sides[0]
        .join(sides[1], on=["step", "unrolled_pos"])
        .select("step", "unrolled_pos", "n0", "n1", (col("mean0") - col("mean1")).alias("difference")),
        "added_column": live.groupby("run_id").agg(
            col("later").count().alias("n"),
            col("step").count().alias("all"),
            col("later").mean().alias("mean"),
        ),
        "assignments": live.groupby("run_id").agg(col("expert_count").list_sum().sum()),
    }
    answers: Answers = {}
    for name, frame in frames.items():
        columns = frame.to_pydict()
        answers[name] = sorted(zip(*columns.values(), strict=True))
    return answers
