"""`probe_router`: the columns of `router` over a fixed probe corpus."""

from loopscope.catalog.table import TableSpec
from loopscope.catalog.tables import router
from loopscope.catalog.tables.keys import CORPUS_KEYS, VISIT_KEY
from loopscope.catalog.tables.router_scores import SCORES

TABLE = TableSpec(
    name="probe_router",
    doc="The router columns over a fixed probe corpus; one row per probe step and visit.",
    primary_key=(*VISIT_KEY, "corpus_hash"),
    version=router.TABLE.version,
    oldest=router.TABLE.oldest,
    columns=(*router.KEYS, *CORPUS_KEYS, *router.LOAD, *SCORES),
)
