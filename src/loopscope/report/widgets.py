"""The kinds of chart that the report is made of, in Altair, without colours of their own.

Colours come from the page's theme (light or dark): `category` for parts, `ordinal` for loop steps in order,
`heatmap` for amounts, `diverging` around a middle. All are told apart in greyscale too, or by their dashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import pyarrow as pa

Spec = dict[str, Any]
_DATA = alt.NamedData("data")
_HEIGHT = 220
# One for each of the theme's eight colours: parts are told apart without colour too.
_DASHES = [[1, 0], [6, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 2, 1, 2], [1, 3], [8, 2, 2, 2, 2, 2]]

# Whole numbers as long as they are short, then 10k, 2.5M.
_SHORT = "abs(datum.value) < 1e4 ? format(datum.value, '{below}') : format(datum.value, '.3~s')"

Mark = tuple[int, str]
"""A step that is marked, and what happened there."""


def x_step(title: str = "step", field: str = "step") -> alt.X:
    """The training axis: optimizer steps or tokens."""
    axis = alt.Axis(labelExpr=_SHORT.format(below=",.0f"), tickCount=6, tickMinStep=1, labelOverlap=True)
    return alt.X(f"{field}:Q", title=title, axis=axis, scale=alt.Scale(nice=False, zero=False))


def lines(
    *,
    y: str,
    color: str,
    kind: str = "nominal",
    x: alt.X | None = None,
    log: bool = False,
    symlog: float | None = None,
    zero: bool = False,
    marks: Sequence[Mark] = (),
    bound: float | None = None,
    color_title: str | None = None,
    band: bool = True,
    height: int = _HEIGHT,
    points: bool = False,
    columns: int | None = None,
    label_limit: int = 130,
) -> Spec:
    """Lines of mean values over steps, each in the band of its bucket's smallest and largest value.

    The data has the columns of `x`, `value`, `low`, `high` and the one named by `color`. `symlog`: the axis is
    logarithmic from this value on and linear below it, for what may be 0.
    """
    scale = alt.Scale(type="log") if log else alt.Scale(zero=zero)
    # A logarithmic axis chooses its labels by its format.
    said: Any = {"format": ".4~g"} if log else {"labelExpr": _SHORT.format(below=".4~g")}
    axis = alt.Axis(**said, tickCount=5, labelOverlap=True, grid=not log)
    if symlog is not None:
        scale = alt.Scale(type="symlog", constant=symlog)
        axis = alt.Axis(
            labelExpr="datum.value ? format(datum.value, '.0e') : '0'",
            values=[0, *(10.0**e for e in range(-8, 5, 2))],
            labelOverlap=True,
        )
    x = x or x_step()
    sort = None if kind == "nominal" else alt.Undefined
    # As many beside each other as fit on a phone.
    legend = alt.Legend(columns=columns or (3 if kind == "nominal" else 6), labelLimit=label_limit)
    base = alt.Chart(_DATA).encode(x=x)
    tooltip = [
        x_tip(x), alt.Tooltip(color, type=kind), alt.Tooltip("value:Q", format=".5g", title="mean"),  # type: ignore[arg-type]
        alt.Tooltip("low:Q", format=".5g", title="smallest"), alt.Tooltip("high:Q", format=".5g", title="largest"),
    ]  # fmt: skip
    line = base.mark_line(strokeWidth=1.6, point={"size": 22} if points else False).encode(
        y=alt.Y("value:Q", title=y, scale=scale, axis=axis),
        color=alt.Color(color, type=kind, title=color_title, sort=sort, legend=legend),  # type: ignore[arg-type]
        tooltip=tooltip,
    )
    if kind == "nominal":
        dashes = alt.Scale(range=_DASHES)
        line = line.encode(
            strokeDash=alt.StrokeDash(f"{color}:N", title=color_title, sort=sort, scale=dashes, legend=legend)
        )
    # A line cannot be pointed at between its points; an invisible point can.
    hover = base.mark_point(size=80, filled=True, opacity=0).encode(y=alt.Y("value:Q"), tooltip=tooltip)
    layers: list[Any] = [line, hover]
    if band:
        # Filled by a channel and field of its own: else the band's legend would merge with the line's.
        shade = alt.Fill(
            "band", type=kind, sort=sort, legend=None,  # type: ignore[arg-type]
            scale=alt.Scale(range="category" if kind == "nominal" else "ordinal"),
        )  # fmt: skip
        area = base.transform_calculate(band=f"datum[{color!r}]").mark_area(opacity=0.18)
        area = area.encode(y=alt.Y("low:Q", title=y, scale=scale), y2="high:Q", fill=shade)
        layers.insert(0, area)
    layers += _rules(marks, bound, scale)
    return _finished(alt.layer(*layers), height)


def line_data(
    thinned: pa.Table, column: str, group: str, of: Any, *, x: str = "step", known: bool = False
) -> pa.Table:
    """What `lines` draws of a column of thinned rows.

    Args:
        thinned: as `RunQueries.thinned` gives it.
        column: the column.
        group: column that tells the lines apart.
        of: its values, or one text for all rows.
        x: column of the horizontal axis.
        known: leave out rows without a value.
    """
    named = pa.repeat(of, thinned.num_rows) if isinstance(of, str) else of
    low, high = thinned[f"{column}_min"], thinned[f"{column}_max"]
    rows = pa.table({x: thinned[x], group: named, "value": thinned[column], "low": low, "high": high})
    return rows.filter(rows["value"].is_valid()) if known else rows


def heatmap(
    *, y_order: Sequence[str], value: str, title: str, last: int, domain: Sequence[float] | None = None
) -> Spec:
    """A step × depth map of `value`; a cell holds from its trace to the next one. One without a value is grey, and
    says in its tooltip what the column `missing` says.
    """
    # A range that means something, where there is one: noise must not be stretched over all colours.
    scale = alt.Scale() if domain is None else alt.Scale(domain=list(domain))
    place = [
        alt.Tooltip("visit:N"), alt.Tooltip("step:Q", title="from step"), alt.Tooltip("step_to:Q", title="to step"),
    ]  # fmt: skip
    tooltip = [
        *place,
        alt.Tooltip(f"{value}:Q", format=".5g", title=value),
        alt.Tooltip(f"{value}_min:Q", format=".5g", title="smallest"),
        alt.Tooltip(f"{value}_max:Q", format=".5g", title="largest"),
    ]
    limits = alt.Scale(nice=False, zero=False, domainMax=last)
    axis = alt.Axis(labelOverlap=True, labelLimit=120)
    cells = alt.Chart(_DATA).encode(
        x=x_step().scale(limits), x2="until:Q", y=alt.Y("visit:N", sort=list(y_order), title=None, axis=axis)
    )
    known = cells.transform_filter(f"isValid(datum[{value!r}])").mark_rect(clip=True)
    known = known.encode(
        color=alt.Color(f"{value}:Q", title=title, scale=scale, legend=gradient()), tooltip=tooltip
    )
    missing = cells.transform_filter(f"!isValid(datum[{value!r}])").mark_rect(clip=True, style="missing")
    missing = missing.encode(tooltip=[*place, alt.Tooltip("missing:N", title="missing")])
    return _finished(alt.layer(known, missing), min(560, max(96, 17 * len(y_order))))


def matrix(*, x: str, y: str, value: str, title: str, middle: float | None = None, **more: Any) -> Spec:
    """Cells over two ordered coordinates; with `middle` the colours diverge around it.

    Args:
        x: column of the horizontal coordinate.
        y: column of the vertical one.
        value: column that is drawn.
        title: of the legend.
        middle: the value without a colour.
        more: `domain`; `x_title`, `y_title`; `ordered`: coordinates are names in the data's order, not numbers;
            `extra`, `names`: numbers and texts of the tooltip; `labels`: print the value in its cell; `cross`: column
            that is 1 where a cross is drawn; `height` in pixels.
    """
    scale = alt.Scale()
    if middle is not None:
        # Blended as red, green and blue: by hue the way from blue to orange would lead through other colours.
        scale = alt.Scale(range="diverging", domainMid=middle, interpolate="rgb")
    if "domain" in more:
        scale.domain = more["domain"]
    tooltip = [
        *(alt.Tooltip(name, type="ordinal") for name in (x, y)),
        *(alt.Tooltip(f"{name}:Q", format=".4g") for name in (value, *more.get("extra", ()))),
        *(alt.Tooltip(name, type="nominal") for name in more.get("names", ())),
    ]
    ordinal: dict[str, Any] = {
        "type": "ordinal",
        "axis": alt.Axis(labelOverlap=True, labelAngle=0, labelLimit=120),
    }
    if more.get("ordered"):
        # Names come in the order of depth; numbers are sorted by Vega itself.
        ordinal["sort"] = None
    base = alt.Chart(_DATA).encode(
        x=alt.X(x, title=more.get("x_title", x), **ordinal),
        y=alt.Y(y, title=more.get("y_title", y), **ordinal),
        tooltip=tooltip,
    )
    cells = base.mark_rect().encode(
        color=alt.Color(f"{value}:Q", title=title, scale=scale, legend=gradient())
    )
    layers = [cells]
    if more.get("cross"):
        layers.append(
            base.transform_filter(alt.datum[more["cross"]] == 1).mark_point(
                shape="cross", angle=45, size=70, filled=True, style="cross"
            )
        )
    if more.get("labels"):
        # Outlined, so that the number is read on every colour and in both themes.
        text = base.encode(text=alt.Text(f"{value}:Q", format=".2f"))
        layers += [
            text.mark_text(fontSize=11, stroke="white", strokeWidth=3, color="white", strokeJoin="round"),
            text.mark_text(fontSize=11, color="black"),
        ]
    return _finished(alt.layer(*layers), more.get("height", _HEIGHT))


def gradient() -> alt.Legend:
    """A colour bar above the chart, which leaves its width to the chart."""
    return alt.Legend(
        orient="top",
        gradientLength=200,
        gradientThickness=10,
        titleLimit=260,
        tickCount=4,
        labelOverlap="greedy",
    )


def x_tip(x: alt.X) -> alt.Tooltip:
    """The axis' value in the tooltip."""
    return alt.Tooltip(str(x.shorthand), format=",.0f")


def _rules(marks: Sequence[Mark], bound: float | None, scale: alt.Scale) -> list[Any]:
    layers = []
    if marks:
        values = alt.InlineData(
            values=[{"step": step, "what": f"step {step}: {what}"} for step, what in marks]
        )
        rule = alt.Chart(values).mark_rule(strokeDash=[4, 3], style="mark")
        layers.append(rule.encode(x="step:Q", tooltip="what:N"))
    if bound is not None:
        values = alt.InlineData(values=[{"bound": bound}])
        rule = alt.Chart(values).mark_rule(strokeDash=[2, 3], style="bound")
        layers.append(
            rule.encode(y=alt.Y("bound:Q", scale=scale), tooltip=alt.Tooltip("bound:Q", format=".3g"))
        )
    return layers


def _finished(chart: Any, height: int) -> Spec:
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    # The page's theme is the configuration; Altair's default one would fix sizes and colours.
    spec.pop("config", None)
    spec.pop("$schema", None)
    return spec
