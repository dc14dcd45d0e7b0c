"""The loss on the fixed corpus, by stratum."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, ChartData, Section
from loopscope.report.charts.maps import Map, maps
from loopscope.report.queries import SERIES_BUCKETS, RunQueries, quoted
from loopscope.report.widgets import lines

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

_MAPS = (
    Map(
        id="probe_load_entropy", column="load_entropy_ratio", title="Evenness of the load, on the corpus", least=0.8,
        text="1: every expert gets its share. The text is the same at every probe, so that what changes is the model.",
        most=1.0, cell="smallest",
    ),
    Map(
        id="probe_margin", column="margin_p50", title="Margin of the choice (median), on the corpus", least=0.0,
        text="Distance from the best to the last chosen expert's score. Near 0 the choice is arbitrary.",
    ),
)  # fmt: skip
# Names whose order is not the alphabet's.
_STRATA = ("all", "low", "mid", "high")


def section(queries: RunQueries) -> Section:
    """One chart per kind of stratum, and maps of the routers over the same text."""
    if not queries.has("probe_loss"):
        return Section(
            id="probe",
            nav="Probe",
            title="Probe",
            text="The run has no probe: there is no row of the table probe_loss.",
        )
    scope = queries.scope("probe_loss")
    buckets = queries.buckets("probe_loss", SERIES_BUCKETS)
    corpora = queries.rows("select distinct corpus_name, corpus_hash from probe_loss")
    charts = []
    for row in queries.rows(f"select distinct stratum_kind as kind from probe_loss where {scope.where}"):
        kind = row["kind"]
        title, text = _KINDS.get(kind, (f"Loss by {kind}", "Strata are fixed in the corpus' manifest."))
        source = f"(select * from probe_loss where {scope.where} and stratum_kind = {quoted(kind)})"
        by = ("stratum", "corpus_hash")
        data = [
            {
                "step": r["step"], "value": r["loss_mean"], "low": r["loss_mean_min"], "high": r["loss_mean_max"],
                "stratum": r["stratum"] if len(corpora) == 1 else f"{r['stratum']} ({r['corpus_hash'][:6]})",
            }
            for r in sorted(queries.thinned(source, ["loss_mean"], buckets.per_bucket, by=by), key=_order)
            if r["loss_mean"] is not None
        ]  # fmt: skip
        charts.append(
            Chart(
                id=f"probe_{kind}",
                title=title,
                text=text,
                spec=lines(y="nats per token", color="stratum", points=True, band=buckets.per_bucket > 1),
                data=ChartData.of(data),
                metrics=(("probe_loss", "loss_mean"),),
                scope=scope.words,
                notes=(
                    *((buckets.note,) if buckets.note else ()),
                    *queries.missing("probe_loss", ("loss_mean",), f"stratum_kind = {quoted(kind)}"),
                ),
            )
        )
    order = list(_KINDS)
    charts.sort(key=lambda c: order.index(c.id[6:]) if c.id[6:] in order else len(order))
    if queries.has("probe_router"):
        charts += maps(queries, "probe_router", _MAPS)
    named = ", ".join(f"{c['corpus_name'] or 'unnamed'} ({(c['corpus_hash'] or '?')[:12]})" for c in corpora)
    text = f"Corpus: {named}. Step 0 is the initialisation; the values of step s belong to the parameters after it."
    if len(corpora) > 1:
        text += " Losses on different corpora are not comparable."
    return Section(id="probe", nav="Probe", title="The fixed probe", charts=charts, text=text)


def _order(row: dict[str, Any]) -> tuple[int, str, int]:
    name = str(row["stratum"])
    return (_STRATA.index(name) if name in _STRATA else len(_STRATA), name, row["step"])
