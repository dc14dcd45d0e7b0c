"""The kinds of chart that the report is made of, as Vega-Lite without colours of its own.

Colours come from the page's theme (light or dark): `category` for parts, `ordinal` for loop steps in order,
`heatmap` for amounts, `diverging` around a middle. All are told apart in greyscale too, or by their dashes.
Specifications are plain dicts: Altair takes longer to build and check one than all of its chart's queries together.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

Spec = dict[str, Any]
_HEIGHT = 220
# One for each of the theme's eight colours: parts are told apart without colour too.
_DASHES = [[1, 0], [6, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 2, 1, 2], [1, 3], [8, 2, 2, 2, 2, 2]]

# Whole numbers as long as they are short, then 10k, 2.5M.
_SHORT = "abs(datum.value) < 1e4 ? format(datum.value, '{below}') : format(datum.value, '.3~s')"
# A colour bar above the chart, which leaves its width to the chart.
_GRADIENT = {
    "orient": "top", "gradientLength": 200, "gradientThickness": 10, "titleLimit": 260, "tickCount": 4,
    "labelOverlap": "greedy",
}  # fmt: skip

Mark = tuple[int, str]
"""A step that is marked, and what happened there."""


def field(name: str, kind: str = "quantitative", **more: Any) -> Spec:
    """A channel that shows a column; `kind` is Vega-Lite's type."""
    return {"field": name, "type": kind, **more}


def x_step(title: str = "step", name: str = "step") -> Spec:
    """The training axis: optimizer steps or tokens."""
    axis = {"labelExpr": _SHORT.format(below=",.0f"), "tickCount": 6, "tickMinStep": 1, "labelOverlap": True}
    return field(name, title=title, axis=axis, scale={"nice": False, "zero": False})


def lines(
    *,
    y: str,
    color: str,
    kind: str = "nominal",
    x: Spec | None = None,
    log: bool = False,
    symlog: float | None = None,
    zero: bool = False,
    marks: Sequence[Mark] = (),
    bound: float | None = None,
    color_title: str | None = None,
    band: bool = True,
    points: bool = False,
    columns: int | None = None,
    label_limit: int = 130,
) -> Spec:
    """Lines of mean values over steps, each in the band of its bucket's smallest and largest value.

    The data has the columns of `x`, `value`, `low`, `high` and the one named by `color`. `symlog`: the axis is
    logarithmic from this value on and linear below it, for what may be 0.
    """
    nominal = kind == "nominal"
    x = x or x_step()
    scale: Spec = {"type": "log"} if log else {"zero": zero}
    # A logarithmic axis chooses its labels by its format.
    said = {"format": ".4~g"} if log else {"labelExpr": _SHORT.format(below=".4~g")}
    axis: Spec = {**said, "tickCount": 5, "labelOverlap": True, "grid": not log}
    if symlog is not None:
        scale = {"type": "symlog", "constant": symlog}
        axis = {
            "labelExpr": "datum.value ? format(datum.value, '.0e') : '0'",
            "values": [0, *(10.0**e for e in range(-8, 5, 2))],
            "labelOverlap": True,
        }
    # Names keep the data's order. As many beside each other as fit on a phone.
    sort = {"sort": None} if nominal else {}
    legend = {"columns": columns or (3 if nominal else 6), "labelLimit": label_limit}
    named = {"title": color_title, "legend": legend, **sort}
    tooltip = [
        field(x["field"], format=",.0f"), field(color, kind), field("value", format=".5g", title="mean"),
        field("low", format=".5g", title="smallest"), field("high", format=".5g", title="largest"),
    ]  # fmt: skip
    line = {
        "x": x,
        "y": field("value", title=y, scale=scale, axis=axis),
        "color": field(color, kind, **named),
    }
    if nominal:
        line["strokeDash"] = field(color, scale={"range": _DASHES}, kind="nominal", **named)
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.6, "point": {"size": 22} if points else False},
            "encoding": {**line, "tooltip": tooltip},
        },
        # A line cannot be pointed at between its points; an invisible point can.
        {
            "mark": {"type": "point", "size": 80, "filled": True, "opacity": 0},
            "encoding": {"x": x, "y": field("value"), "tooltip": tooltip},
        },
    ]
    if band:
        # Filled by a channel and field of its own: else the band's legend would merge with the line's.
        fill = field("band", kind, legend=None, scale={"range": "category" if nominal else "ordinal"}, **sort)
        area = {"x": x, "y": field("low", title=y, scale=scale), "y2": {"field": "high"}, "fill": fill}
        shade = {
            "transform": [{"calculate": f"datum[{color!r}]", "as": "band"}],
            "mark": {"type": "area", "opacity": 0.18},
            "encoding": area,
        }
        layers.insert(0, shade)
    if marks:
        values = [{"step": step, "what": f"step {step}: {what}"} for step, what in marks]
        layers.append(_rule("mark", [4, 3], values, x=field("step"), tooltip=field("what", "nominal")))
    if bound is not None:
        at, told = field("bound", scale=scale), field("bound", format=".3g")
        layers.append(_rule("bound", [2, 3], [{"bound": bound}], y=at, tooltip=told))
    return _layered(layers)


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


def heatmap(*, y_order: Sequence[str], value: str, last: int, domain: Sequence[float] | None = None) -> Spec:
    """A step × depth map of `value`; a cell holds from its trace to the next one. One without a value is grey, and
    says in its tooltip what the column `missing` says.
    """
    # A range that means something, where there is one: noise must not be stretched over all colours.
    scale = {} if domain is None else {"domain": domain}
    place = [field("visit", "nominal"), field("step", title="from step"), field("step_to", title="to step")]
    axes = {
        "x": {**x_step(), "scale": {"nice": False, "zero": False, "domainMax": last}},
        "x2": {"field": "until"},
        "y": field(
            "visit", "nominal", sort=y_order, title=None, axis={"labelOverlap": True, "labelLimit": 140}
        ),
    }
    tooltip = [
        *place, field(value, format=".5g", title=value), field(f"{value}_min", format=".5g", title="smallest"),
        field(f"{value}_max", format=".5g", title="largest"),
    ]  # fmt: skip
    layers = [
        {
            "transform": [{"filter": f"isValid(datum[{value!r}])"}],
            "mark": {"type": "rect", "clip": True},
            "encoding": {
                **axes,
                "color": field(value, title=value, scale=scale, legend=_GRADIENT),
                "tooltip": tooltip,
            },
        },
        {
            "transform": [{"filter": f"!isValid(datum[{value!r}])"}],
            "mark": {"type": "rect", "clip": True, "style": "missing"},
            "encoding": {**axes, "tooltip": [*place, field("missing", "nominal", title="missing")]},
        },
    ]
    return _layered(layers, min(560, max(96, 17 * len(y_order))))


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
    scale: Spec = {"domain": more["domain"]} if "domain" in more else {}
    if middle is not None:
        # Blended as red, green and blue: by hue the way from blue to orange would lead through other colours.
        scale |= {"range": "diverging", "domainMid": middle, "interpolate": "rgb"}
    ordinal: Spec = {"axis": {"labelOverlap": True, "labelAngle": 0, "labelLimit": 140}}
    if more.get("ordered"):
        # Names come in the order of depth; numbers are sorted by Vega itself.
        ordinal["sort"] = None
    shared = {
        "x": field(x, "ordinal", title=more.get("x_title", x), **ordinal),
        "y": field(y, "ordinal", title=more.get("y_title", y), **ordinal),
        "tooltip": [
            *(field(name, "ordinal") for name in (x, y)),
            *(field(name, format=".4g") for name in (value, *more.get("extra", ()))),
            *(field(name, "nominal") for name in more.get("names", ())),
        ],
    }
    color = field(value, title=title, scale=scale, legend=_GRADIENT)
    layers: list[Spec] = [{"mark": {"type": "rect"}, "encoding": {**shared, "color": color}}]
    if more.get("cross"):
        cross = {"type": "point", "shape": "cross", "angle": 45, "size": 70, "filled": True, "style": "cross"}
        only = [{"filter": f"datum[{more['cross']!r}] === 1"}]
        layers.append({"transform": only, "mark": cross, "encoding": shared})
    if more.get("labels"):
        # Outlined, so that the number is read on every colour and in both themes.
        outline = {"stroke": "white", "strokeWidth": 3, "color": "white", "strokeJoin": "round"}
        encoding = {**shared, "text": field(value, format=".2f")}
        layers += [
            {"mark": {"type": "text", "fontSize": 11, **paint}, "encoding": encoding}
            for paint in (outline, {"color": "black"})
        ]
    return _layered(layers, more.get("height", _HEIGHT))


def _rule(style: str, dash: list[int], values: list[Spec], **encoding: Spec) -> Spec:
    mark = {"type": "rule", "strokeDash": dash, "style": style}
    return {"data": {"values": values}, "mark": mark, "encoding": encoding}


def _layered(layers: list[Spec], height: int = _HEIGHT) -> Spec:
    return {"data": {"name": "data"}, "width": "container", "height": height, "layer": layers}
