"""`probe_loss`: loss over a fixed corpus, by stratum."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import CORPUS_KEYS, ROW_KEY, RUN_KEYS

_loss = partial(
    Column,
    unit="nats",
    needs=("per_token_loss",),
    source="definition; strata of documents from the corpus's manifest, of tokens by earlier occurrences",
    null_rule="no token in the stratum: not_applicable; not finite: nonfinite",
)

_WHOLE = (("stratum_kind", "all"),)
_gauge = partial(Gauge, table="probe_loss", column="loss_mean", how="only")

GAUGES = (
    _gauge(
        key="probe/loss",
        where=_WHOLE,
        headline=True,
        title="Loss on the probe corpus",
        text="Comparable where both runs were probed on the same corpus.",
        axis="nats per token",
    ),
    *(
        _gauge(
            key=f"probe/loss_repetition_{name}",
            where=(("stratum_kind", "repetition"), ("stratum", name)),
        )
        for name in ("low", "mid", "high")
    ),
)

TABLE = TableSpec(
    name="probe_loss",
    doc="One row per probe step and stratum of the corpus; step s describes the parameters after update s.",
    primary_key=(*ROW_KEY, "corpus_hash", "stratum_kind", "stratum"),
    version=2,
    oldest=2,
    columns=(
        *RUN_KEYS,
        *CORPUS_KEYS,
        Column(
            name="stratum_kind",
            type="string",
            formula="all, repetition, domain, in_context_token, in_context_bigram",
            required=True,
        ),
        Column(name="stratum", type="string", formula="the bucket's or domain's name", required=True),
        _loss(
            name="loss_mean",
            formula="loss_sum/num_target_tokens, one flat mean per stratum",
            merge="mean by num_target_tokens",
            shown=("diff", "probe_diff"),
        ),
        _loss(name="loss_sum", formula="Σ cross-entropy over the stratum's target tokens", merge="sum"),
        Column(name="num_target_tokens", type="int64", formula="tokens with a target in the stratum"),
        Column(name="num_documents", type="int32", formula="documents with a token in the stratum"),
    ),
    gauges=GAUGES,
    shown_rows=_WHOLE,
)
