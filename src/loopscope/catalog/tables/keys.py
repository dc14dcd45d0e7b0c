"""Columns that several tables share, and what names a row."""

from functools import partial

from loopscope.catalog.table import Column

_key = partial(Column, type="int32")
_text = partial(Column, type="string")

RUN_KEYS = (
    _text(name="run_id", formula="UUIDv7 of the run", required=True),
    _key(name="attempt", formula="attempt of the run that wrote the row, from 1", required=True),
    _key(
        name="step",
        type="int64",
        formula="optimizer step, from 1; 0 is the initialisation (probes)",
        required=True,
    ),
    _key(name="rank", formula="rank that the row describes; null for a global row"),
    _key(name="world_size", formula="ranks of this attempt"),
    _text(name="aggregation_scope", formula="rank_local or global"),
    _key(
        name="tokens_seen",
        type="int64",
        formula="training tokens up to and including this step, over all ranks",
        unit="tokens",
    ),
    Column(name="elapsed_s", formula="seconds since the attempt began, on a monotonic clock", unit="s"),
    Column(
        name="wall_time",
        type="timestamp[us, UTC]",
        formula="time of writing on the wall clock, which may jump",
    ),
    _text(
        name="null_reasons",
        formula="JSON object: column → why it is null; null when nothing is missing",
    ),
)
"""Every table but `attempt` starts with these."""

RUN_KEY_NAMES = tuple(column.name for column in RUN_KEYS if column.name != "null_reasons")
"""What a row that is made beside another row of its step takes over from it."""

OWN_STEP_NAMES = ("tokens_seen", "elapsed_s", "wall_time")
"""Of these, what belongs to one step alone."""

VISIT_KEYS = (
    _text(name="block", formula="head, loop or tail"),
    _key(name="unrolled_pos", formula="0-based depth in the unrolled network", required=True),
    _key(name="loop_step", formula="pass through the stack; null outside the loop"),
    _key(name="layer_idx", formula="physical layer in the stack; null outside the loop"),
    _key(name="num_loop_steps", formula="R really executed this step"),
    _key(name="num_experts", formula="E of this layer; 0 where it is dense"),
    _key(name="top_k", formula="k of this layer; 0 where it is dense"),
    _text(name="score_func", formula="softmax or sigmoid"),
)

TOKEN_KEYS = (
    _key(name="num_tokens", type="int64", formula="valid tokens that the row reduces"),
    _key(name="num_microbatches", formula="microbatches that the row reduces"),
)

CORPUS_KEYS = (
    _text(name="corpus_name", formula="name of the probe corpus"),
    _text(name="corpus_hash", formula="SHA-256 over the corpus's tokens", required=True),
    Column(
        name="first_token_dropped",
        type="bool",
        formula="the tokenizer's marker before every document was dropped",
    ),
)

CORPUS_TOKENS = _key(name="num_tokens", type="int64", formula="tokens of the corpus")

PROBE_VISIT_KEYS = (*RUN_KEYS, *VISIT_KEYS, *CORPUS_KEYS, CORPUS_TOKENS)
"""What every row of a probe about one visit starts with."""

ROW_KEY = ("run_id", "attempt", "step", "aggregation_scope", "rank")
"""What names a row of a table with one row per step."""
VISIT_KEY = (*ROW_KEY, "unrolled_pos")
"""What names a row of a table with one row per step and visit."""

# Said of many columns.
SWITCH = "Fedus et al. 2021, arXiv 2101.03961"
NO_TOKEN = "no valid token: absent"
BY_TOKEN = "mean by num_tokens"
