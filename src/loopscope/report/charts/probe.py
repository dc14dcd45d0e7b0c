"""The loss on the fixed corpus, by stratum."""

from dataclasses import replace

from loopscope.catalog.registry import TABLES
from loopscope.catalog.table import Column
from loopscope.report.chart import Chart, Section
from loopscope.report.charts.router import maps
from loopscope.report.queries import SERIES_BUCKETS, RunQueries, quoted
from loopscope.report.widgets import line_data, lines

_KINDS = {
    "all": ("Loss on the whole corpus", "Mean over all target tokens."),
    "repetition": ("Loss by the repetition of a document", "Buckets are fixed in the corpus' manifest."),
    "domain": ("Loss by domain", "Domains are fixed in the corpus' manifest."),
    "in_context_token": (
        "Loss by earlier occurrences of the token",
        "How often the target token came before in its document. A copying model is better where it did.",
    ),
    "in_context_bigram": (
        "Loss by earlier occurrences of the bigram",
        "How often the target came before after the same token: an induction head's gain.",
    ),
}
_MAPS = ("load_entropy_ratio", "margin_p50")
# Names whose order is not the alphabet's.
_STRATA = ("all", "low", "mid", "high")


def section(queries: RunQueries) -> Section:
    """One chart per kind of stratum, and maps of the routers over the same text."""
    if not queries.has("probe_loss"):
        text = "The run has no probe: there is no row of the table probe_loss."
        return Section(id="probe", nav="Probe", title="Probe", text=text)
    corpora = queries.rows("select distinct corpus_name, corpus_hash from probe_loss")
    found = queries.rows(
        f"select distinct stratum_kind as kind from {queries.speaking('probe_loss')} order by all"
    )
    kinds = sorted((row["kind"] for row in found), key=lambda kind: (*_KINDS, kind).index(kind))
    charts = [_chart(queries, kind, several=len(corpora) > 1) for kind in kinds]
    charts += maps(
        queries, "probe_router", [_on_the_corpus(TABLES["probe_router"].by_name[name]) for name in _MAPS]
    )
    named = ", ".join(f"{c['corpus_name'] or 'unnamed'} ({(c['corpus_hash'] or '?')[:12]})" for c in corpora)
    text = f"Corpus: {named}. Step 0 is the initialisation; the values of step s belong to the parameters after it."
    if len(corpora) > 1:
        text += " Losses on different corpora are not comparable."
    return Section(id="probe", nav="Probe", title="The fixed probe", charts=charts, text=text)


def _chart(queries: RunQueries, kind: str, *, several: bool) -> Chart:
    title, text = _KINDS.get(kind, (f"Loss by {kind}", "Strata are fixed in the corpus' manifest."))
    only = f"stratum_kind = {quoted(kind)}"
    name = "stratum || ' (' || left(corpus_hash, 6) || ')'" if several else "stratum"
    place = f"coalesce(list_position({list(_STRATA)}, stratum), 99)"
    source = f"(select *, {name} as line, {place} as place from {queries.speaking('probe_loss', only)})"
    rows, buckets = queries.thinned(source, SERIES_BUCKETS, ["loss_mean"], by=("place", "stratum", "line"))
    rows = rows.sort_by([(key, "ascending") for key in ("place", "stratum", "step", "line")])
    return queries.chart(
        "probe_loss",
        ("loss_mean",),
        buckets=buckets,
        only=only,
        id=f"probe_{kind}",
        title=title,
        text=text,
        spec=lines(y="nats per token", color="stratum", points=True, band=buckets.size > 1),
        data=line_data(rows, "loss_mean", "stratum", rows["line"], known=True),
    )


def _on_the_corpus(column: Column) -> Column:
    """The column with the router's picture, for the chart over the fixed text."""
    assert column.picture is not None
    picture = replace(
        column.picture,
        id=f"probe_{column.picture.id}",
        title=f"{column.picture.title}, on the corpus",
        text=f"{column.picture.text} The text is the same at every probe, so that what changes is the model.",
    )
    return replace(column, picture=picture)
