"""`probe_readout`: what the model would predict if its loop ended earlier."""

from functools import partial

from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import CORPUS_KEYS, CORPUS_TOKENS, ROW_KEY, RUN_KEYS

_FIRST = "first loop step: not_applicable; not finite: nonfinite"
_readout = partial(
    Column,
    unit="nats",
    needs=("residual",),
    merge="mean by num_target_tokens",
    source="the logit lens (nostalgebraist 2020) through the model's own tail",
    null_rule="not finite: nonfinite",
)

TABLE = TableSpec(
    name="probe_readout",
    doc="One row per probe step and loop step: what the model would predict if the loop ended there.",
    primary_key=(*ROW_KEY, "corpus_hash", "readout", "loop_step"),
    version=2,
    oldest=2,
    columns=(
        *RUN_KEYS,
        *CORPUS_KEYS,
        Column(
            name="readout",
            type="string",
            formula="tail: through the tail layers; head: straight to norm and head",
            required=True,
        ),
        Column(name="loop_step", type="int32", formula="the pass after which is read out", required=True),
        Column(name="num_loop_steps", type="int32", formula="R really executed"),
        CORPUS_TOKENS,
        Column(name="num_target_tokens", type="int64", formula="tokens with a target"),
        _readout(
            name="loss_mean",
            formula="cross-entropy of q_r, r → tail → norm → head",
            shown=("probe_diff",),
        ),
        _readout(name="loss_sum", formula="Σ cross-entropy of q_r", merge="sum"),
        _readout(
            name="kl_from_previous",
            formula="mean_t KL(q_{r−1} ‖ q_r)",
            null_rule=_FIRST,
            shown=("probe_diff",),
        ),
        _readout(name="entropy_mean", formula="mean_t H(q_r)", shown=("probe_diff",)),
        _readout(name="entropy_change", formula="mean_t H(q_r) − mean_t H(q_{r−1})", null_rule=_FIRST),
        _readout(
            name="argmax_settled",
            formula="share of tokens whose arg-max equals that of every later step",
            unit="1",
            null_rule="last loop step: not_applicable",
        ),
    ),
)
