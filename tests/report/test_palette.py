"""Colours as people with colour-blind eyes, on paper and in the dark see them: distances in OKLab."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

CARD = {"light": "#ffffff", "dark": "#1d2125"}
# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
# Ottosson 2020.
LMS = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
       [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
LAB = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
       [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip


def script():
    return files("loopscope.report").joinpath("assets", "report.js").read_text(encoding="utf-8")


def colours(theme, name):
    """The theme's list, or what its name stands for."""
    block = script().split(f"    {theme}: {{")[1].split("    },")[0]
    value = re.search(rf"\b{name}(?:: (\[[^]]*\]|\w+))?,", block).group(1) or name
    if not value.startswith("["):
        value = re.search(rf"const {value} = (\[[^]]*\])", script()).group(1)
    return re.findall(r"#[0-9a-f]{6}", value)


def linear(colour):
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def oklab(colour, eyes="usual"):
    seen = np.clip(np.array(EYES[eyes]) @ linear(colour), 0, 1)
    return np.array(LAB) @ np.cbrt(np.array(LMS) @ seen)


def contrast(a, b):
    """WCAG 2."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_the_measure_itself():
    assert oklab("#ffffff") == pytest.approx([1, 0, 0], abs=1e-4)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", CARD)
@pytest.mark.parametrize("eyes", EYES)
def test_parts_are_told_apart_by_every_eye(theme, eyes):
    seen = [oklab(colour, eyes) for colour in colours(theme, "category")]
    assert len(seen) == 8
    # A just noticeable difference is about 0.02.
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.09


@pytest.mark.parametrize("theme", CARD)
def test_lines_stand_out_from_the_card(theme):
    for colour in colours(theme, "category"):
        assert contrast(colour, CARD[theme]) >= 3, colour
    low, high = (float(x) for x in re.search(r"extent: \[([\d.]+), ([\d.]+)\]", _theme(theme)).groups())
    ramp = colours(theme, "heatmap")
    ends = [ramp[round(share * (len(ramp) - 1))] for share in (low, high)]
    # Loop steps are ordered by brightness; the faintest is still to be seen.
    assert min(contrast(colour, CARD[theme]) for colour in ends) > 2.5


@pytest.mark.parametrize("theme", CARD)
@pytest.mark.parametrize("name", ["heatmap", "diverging"])
@pytest.mark.parametrize("eyes", EYES)
def test_maps_grow_brighter_from_end_to_end(theme, name, eyes):
    brightness = [oklab(colour, eyes)[0] for colour in colours(theme, name)]
    assert all(b - a > 0.03 for a, b in itertools.pairwise(brightness))


def test_the_middle_of_the_diverging_colours_is_grey():
    middle = colours("light", "diverging")[2]
    assert np.linalg.norm(oklab(middle)[1:]) < 0.02


def test_parts_have_a_dash_each():
    from loopscope.report.widgets import _DASHES

    assert len({tuple(dash) for dash in _DASHES}) == len(colours("light", "category"))


@pytest.mark.parametrize("theme", CARD)
def test_words_are_read(theme):
    css = files("loopscope.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    block = css.split(":root {")[1 if theme == "light" else 2].split("}")[0]
    value = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for text in ("text", "soft", "link"):
        for ground in ("page", "card", "note-bg"):
            assert contrast(value[text], value[ground]) >= 4.5, (text, ground)
    for state in ("critical", "warn", "ok"):
        assert contrast(value[state], value[f"{state}-bg"]) >= 4.5, state
        assert contrast(value["text"], value[f"{state}-bg"]) >= 4.5, state
        assert contrast(value["soft"], value[f"{state}-bg"]) >= 4.5, state


def _theme(theme):
    return script().split(f"    {theme}: {{")[1].split("    },")[0]
