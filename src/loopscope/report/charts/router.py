"""What the routers do: step × depth maps."""

from __future__ import annotations

from loopscope.report.chart import Section
from loopscope.report.charts.maps import Map, maps
from loopscope.report.queries import RunQueries

# Colours of a ratio end at its rule's bound at least, those of a count at 1.
_MAPS = (
    Map(
        id="load_entropy", column="load_entropy_ratio", title="Evenness of the load", cell="smallest",
        text="1: every expert gets its share; 0: one expert gets everything.", least=0.8, most=1.0,
    ),
    Map(
        id="maxvio", column="maxvio_count", title="Overload of the busiest expert", cell="largest",
        text="0: balanced; 1: it gets twice its share. Its maximum, E/k − 1, may differ between head, loop and tail.",
        least=0.0, most=1.0,
    ),
    Map(
        id="dead", column="dead_experts", title="Experts without a token", cell="largest",
        text="Counted within one traced step.", least=0.0, most=1.0,
    ),
    Map(
        id="margin", column="margin_p50", title="Margin of the choice (median)",
        text="Distance from the best to the last chosen expert's score. Near 0 the choice is arbitrary.", least=0.0,
    ),
    Map(
        id="z", column="z_mean", title="Size of the router's logits (mean logsumexp)",
        text="Balanced small logits give about ln E; towards ln E + 10, or far below 0, they drift.",
    ),
    Map(
        id="token_entropy", column="token_entropy_ratio", title="Indecision per token",
        text="1: a token's probabilities are even; near 0: the router is sure. Low is normal in a specialised router.",
        least=0.0, most=1.0,
    ),
)  # fmt: skip


def section(queries: RunQueries) -> Section:
    """One map per column."""
    if not queries.has("router"):
        text = "The run has no row of the table router: it was not traced, or its layers have no router."
        return Section(id="router", nav="Routing", title="Routing", text=text)
    text = (
        "Depth runs from the top down, in the order of execution; training from left to right. A cell holds from "
        "one trace to the next. A grey cell is missing, and says why; an empty one was not traced."
    )
    return Section(
        id="router", nav="Routing", title="Routing over training and depth", charts=maps(queries, "router", _MAPS),
        text=text,
    )  # fmt: skip
