"""`attempt`: one row per attempt of the run; one join with it gives any engine the live rows."""

from functools import partial

from loopscope.catalog.table import Column, TableSpec

_int = partial(Column, type="int32")
_step = partial(Column, type="int64")
_text = partial(Column, type="string")

TABLE = TableSpec(
    name="attempt",
    doc=(
        "One row per attempt. A row of another table is live where its attempt's "
        "live_from <= step and (live_to is null or step < live_to)."
    ),
    primary_key=("run_id", "attempt"),
    progress=False,
    version=2,
    oldest=2,
    columns=(
        _text(name="run_id", formula="UUIDv7 of the run", required=True),
        _int(name="attempt", formula="number of the attempt, from 1", required=True),
        _int(name="parent_attempt", formula="attempt whose checkpoint it loaded; null when fresh"),
        _step(name="first_step", formula="first step it trains: restored step + 1", required=True),
        _step(name="live_from", formula="first live step; null where no row of the attempt is live"),
        _step(
            name="live_to",
            formula="first step that a later attempt replaces; null where none does",
        ),
        _int(name="world_size", formula="ranks of the attempt"),
        _text(name="host", formula="host that claimed it"),
        _int(name="pid", formula="process that claimed it"),
        Column(name="started", type="timestamp[us, UTC]", formula="when it was claimed"),
        _text(name="loopscope_version", formula="version that wrote it"),
        _text(name="torch_version", formula="version of torch that trained; null where unknown"),
        _text(name="python_version", formula="version of Python that trained"),
    ),
)
