"""Whether the loop converges: size and movement of the hidden state per loop step."""

from loopscope.analysis.records import value
from loopscope.catalog.rows import evenly
from loopscope.report.chart import Chart, Section
from loopscope.report.queries import SERIES_BUCKETS, RunQueries
from loopscope.report.widgets import line_data, lines

_MOST_SERIES = 12
# Table → which rows, and their columns of the loop step and the layer.
_ROWS = {
    "residual": ("block = 'loop'", "loop_step", "layer_idx"),
    "transition": ("kind = 'step_boundary'", "to_loop_step", "to_layer_idx"),
}
# table, id, column, title, how to read it, unit, whether the axis begins at 0
_CHARTS = (
    ("residual", "norm", "norm_mean", "Size of the hidden state", "Mean norm of the stack's output.", "norm", True),
    (
        "transition", "relative_delta", "relative_delta", "Movement from loop step to loop step",
        "‖h_r − h_(r−1)‖/‖h_(r−1)‖. Towards 0 the loop converges.", "relative delta", True,
    ),
    (
        "transition", "growth", "growth", "Growth from loop step to loop step",
        "‖h_r‖/‖h_(r−1)‖. Equal orthogonal updates give 1.41, 1.22, 1.15, ...; a growth that stays above 1.1 does not "
        "converge.", "growth", False,
    ),
    (
        "transition", "state_cosine", "state_cosine", "Direction kept from loop step to loop step",
        "cos(h_r, h_(r−1)). 1: the direction no longer changes.", "cosine", False,
    ),
    (
        "residual", "token_correlation", "token_correlation", "Likeness of a sequence's tokens",
        "Mean cosine over pairs of tokens; near 1 all positions hold the same vector.", "cosine", False,
    ),
)  # fmt: skip


def section(queries: RunQueries) -> Section:
    """One chart per quantity, over training, a line per loop step, at the stack's last layer."""
    charts = [chart for each in _CHARTS if (chart := _chart(queries, *each))]
    text = "" if charts else "No visit of a loop was traced."
    return Section(id="loop", nav="Loop", title="The loop", charts=charts, text=text)


def _chart(
    queries: RunQueries, table: str, name: str, column: str, title: str, text: str, unit: str, zero: bool
) -> Chart | None:
    if not queries.has(table):
        return None
    only, step, layer = _ROWS[table]
    last = value(queries.run, f"select max({layer}) from {queries.speaking(table, only)}")
    if last is None:
        return None
    source = queries.speaking(table, f"{only} and {layer} = {last}")
    present = queries.table(f"select distinct {step} as step from {source} order by all")["step"].to_pylist()
    shown = evenly(present, _MOST_SERIES)
    drawn = ", ".join(map(str, shown))
    notes = () if shown == present else (f"Loop steps {drawn} of {len(present)} are drawn.",)
    source = f"(from {source} where {step} in ({drawn}))"
    rows, buckets = queries.thinned(source, SERIES_BUCKETS, [column], by=(step,))
    bound = {"growth": queries.settings.growth, "token_correlation": queries.settings.token_correlation}.get(
        name
    )
    text += f" At the stack's last layer ({last})."
    if bound is not None:
        text += f" Dotted line: {bound:g}, the rule's bound."
    return queries.chart(
        table,
        (column,),
        buckets=buckets,
        notes=notes,
        only=only,
        id=name,
        title=title,
        text=text,
        spec=lines(
            y=unit, color="loop step", kind="ordinal", zero=zero, color_title="loop step", bound=bound
        ),
        data=line_data(rows, column, "loop step", rows[step]),
    )
