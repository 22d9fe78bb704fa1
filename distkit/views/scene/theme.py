"""Defines the colors and sizes of all views, for the JavaScript and SVG renderers.

The rank colors are plum and the hues of Okabe and Ito (2008), which are distinguishable with all
common forms of color blindness. They have a contrast of at least 3 on white. The dark theme has
lighter tints of the same hues. Computation and failures have other hues.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

RANKS_LIGHT = (
    "#0072B2",
    "#C47F00",
    "#009E73",
    "#C4689B",
    "#2594CF",
    "#B8430A",
    "#8A8200",
    "#9B3F8F",
)
RANKS_DARK = (
    "#3D95E0",
    "#F2B233",
    "#25C296",
    "#E095C0",
    "#8AD2F7",
    "#F58A4B",
    "#DCCB45",
    "#B85FB0",
)

#: One color per compared trace. The first three differ clearly from the rank colors.
TRACES_LIGHT = (
    "#3B4754",
    "#6B21C8",
    "#7A3B0E",
    "#00838F",
    "#5C7F00",
    "#AD1F73",
    "#1F5FBF",
    "#7A6A55",
)
TRACES_DARK = (
    "#C9D3DD",
    "#A45CFF",
    "#B98A66",
    "#4CC5CF",
    "#A8CC4A",
    "#EF7FB8",
    "#7FB0FF",
    "#C8B8A0",
)

#: The color of failures, which also have a hatch or cross.
WARNING_LIGHT, WARNING_DARK = "#C4314B", "#FF6B81"

#: Colors of marked computation. Pipelines mark forward (F), backward (B), and the two
#: parts of backward: the gradients of the input (I) and of the weights (W).
WORK_LIGHT = {"": "#66717D", "F": "#3B3A9E", "B": "#4F6A16", "I": "#7B8F3A", "W": "#80604A"}
WORK_DARK = {"": "#8694A3", "F": "#A9A4FF", "B": "#B5D16A", "I": "#D3E4A0", "W": "#C9A58C"}

#: Colors of tensor values: the largest magnitudes and zero. They differ from the first rank colors.
VALUES_LIGHT, VALUES_DARK = (
    {"positive": "#a58800", "negative": "#6f45d0", "zero": "#f5f5f6"},
    {"positive": "#ffe14d", "negative": "#c3b2ff", "zero": "#262626"},
)

#: Colors of text on white paper, for the static renderers; colors of dark paper and its text.
INK, GRAY = "#17202a", "#5b6773"
PAPER_DARK, INK_DARK, GRAY_DARK = "#111111", "#e9eef3", "#98a5b3"

#: Color of dark text on a rank's color.
DEEP = "#101418"

#: Sizes in CSS pixels.
SIZES = {
    "row": 18,  # height of a communication bar
    "mark": 15,  # height of a bar of marked computation
    "gap": 3,  # between the rows of one lane
    "pad": 6,  # above and below the rows of a lane
    "pitch": 124,  # distance from one lane to the next, if space permits
    "height": 330,  # total height of all lanes, if space permits
    "min_gap": 14,  # between two lanes
    "max_gap": 84,
    "max_rows": 110,  # maximum height of the rows of a lane
    "axis": 34,  # height of the time axis
}


def rank_color(lane: int) -> str:
    """Return the color of a lane on white paper; colors repeat after eight lanes."""
    return RANKS_LIGHT[lane % len(RANKS_LIGHT)]


def work_kind(label: str) -> str:
    """Return the kind of marked computation, a key of ``WORK_LIGHT``.

    >>> work_kind("F12"), work_kind("forward"), work_kind("Fit"), work_kind("busy")
    ('F', 'F', '', '')
    """
    match = re.match(r"(?:([FBIW])\d*$|(forward|backward))", label)
    return (match[1] or match[2][0].upper()) if match else ""


def darkened(color: str) -> str:
    """Return the dark-paper counterpart of a color on white paper.

    Known colors have a fixed counterpart. Any other color is treated as a mixture of a full color
    and white. Its counterpart mixes the brightened full color with dark paper in the same ratio.

    >>> darkened("#0072B2"), darkened("#fff"), darkened("#eee")
    ('#3D95E0', '#111111', '#1f2020')
    """
    if len(color) == 4:
        color = "#" + "".join(2 * digit for digit in color[1:])
    if known := _DARK.get(color.lower()):
        return known
    rgb = channels(color)
    opacity = 1 - min(rgb) / 255
    full = [255 - (255 - c) / opacity for c in rgb]
    brightening = 1.0 if max(full) < 0.45 * 255 else 0.25
    bright = [c + brightening * (ink - c) for c, ink in zip(full, channels(INK_DARK), strict=True)]
    return mixed(bright, channels(PAPER_DARK), opacity)


def mixed(color: Sequence[float], background: Sequence[float], opacity: float) -> str:
    """Blend a color with the background, both given as RGB.

    >>> mixed((0, 0, 0), (255, 255, 255), 0.5)
    '#808080'
    """
    channels = (round(b + opacity * (c - b)) for c, b in zip(color, background, strict=True))
    return f"#{''.join(f'{c:02x}' for c in channels)}"


def channels(color: str) -> tuple[int, ...]:
    """Return the red, green and blue channels of "#rrggbb"."""
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


_DARK = {
    "#ffffff": PAPER_DARK,
    INK: INK_DARK,
    GRAY: GRAY_DARK,
    DEEP: DEEP,
    WARNING_LIGHT.lower(): WARNING_DARK,
    **dict(zip(map(str.lower, RANKS_LIGHT), RANKS_DARK, strict=True)),
    **{color: VALUES_DARK[kind] for kind, color in VALUES_LIGHT.items()},
    **dict(zip(map(str.lower, TRACES_LIGHT), TRACES_DARK, strict=True)),
    **{color.lower(): WORK_DARK[kind] for kind, color in WORK_LIGHT.items()},
}


def theme() -> dict[str, Any]:
    """Return the colors and sizes as plain data, for JavaScript."""
    return {
        "light": {
            "ranks": RANKS_LIGHT,
            "traces": TRACES_LIGHT,
            "warning": WARNING_LIGHT,
            "work": WORK_LIGHT,
            "values": VALUES_LIGHT,
        },
        "dark": {
            "ranks": RANKS_DARK,
            "traces": TRACES_DARK,
            "warning": WARNING_DARK,
            "work": WORK_DARK,
            "values": VALUES_DARK,
        },
        "sizes": SIZES,
    }


#: Outline that keeps text on a card legible above lines.
_HALO: dict[str, str | float] = {
    "stroke": "ink 3.5",
    "stroke-width": 4,
    "paint-order": "stroke",
    "stroke-linejoin": "round",
}
#: SVG presentation attributes of marks, by class. The page defines the colors ink, paper, muted
#: and warning; "ink 5" is 5% ink on paper. "rank" is the rank's color, and "label" is legible on
#: it. "trace" is the color of a compared run; "positive", "negative" and "zero" are for values.
MARKS: dict[str, dict[str, str | float]] = {
    # areas
    "card": {"fill": "ink 3.5", "stroke": "ink 22", "stroke-width": 1.2},
    "now": {"fill": "ink 9"},
    "host": {
        "fill": "ink 3.5",
        "stroke": "ink 3.5",
        "stroke-width": 20,
        "stroke-linejoin": "round",
    },
    "own": {"fill": "rank"},
    "pale": {"fill": "rank", "fill-opacity": 0.36},
    "merging": {"fill": "rank", "fill-opacity": 0.7},
    "works": {"fill": "rank", "fill-opacity": 0.36, "stroke": "rank"},
    "trace": {"fill": "trace"},
    "full": {"fill": "ink"},
    "gray": {"fill": "ink 45"},
    "faint": {"fill": "ink 17"},
    "muted": {"fill": "muted"},
    "bad": {"fill": "warning"},
    "slot": {"fill": "ink 4", "stroke": "ink 30", "stroke-dasharray": "3 2.5"},
    "pill": {"fill": "paper", "stroke": "ink", "stroke-width": 1.4},
    "ring": {"fill": "paper", "stroke": "rank", "stroke-width": 2.6},
    "held": {
        "fill": "paper",
        "stroke": "rank",
        "stroke-width": 2.6,
        "stroke-dasharray": "3.2 2.2",
    },
    "waiting": {
        "fill": "paper",
        "stroke": "rank",
        "stroke-width": 3,
        "stroke-dasharray": "5.5 4",
    },
    "hover": {"fill": "none", "pointer-events": "all"},
    "token": {"fill": "rank", "stroke": "paper", "stroke-width": 2.5},
    "parcel": {"fill": "paper", "stroke": "ink 30", "stroke-width": 1},
    "fresh": {"fill": "none", "stroke": "ink", "stroke-width": 2, "pointer-events": "none"},
    "hub": {"fill": "paper", "stroke": "ink", "stroke-width": 2.5},
    "positive": {"fill": "positive"},
    "negative": {"fill": "negative"},
    "blank": {"fill": "zero"},
    "odd": {"fill": "warning", "fill-opacity": 0.4},
    "bins": {"fill": "rank", "fill-opacity": 0.28, "stroke": "rank", "stroke-width": 1.4},
    "alarm": {"fill": "none", "stroke": "warning", "stroke-width": 1.6},
    # lines
    "cut": {"fill": "none", "stroke": "paper", "stroke-width": 1.5, "pointer-events": "none"},
    "link": {"fill": "none", "stroke": "ink 17", "stroke-width": 1.5},
    "direction": {"fill": "ink 35"},
    "axis": {"fill": "none", "stroke": "muted"},
    "graph": {"fill": "none", "stroke": "rank", "stroke-width": 1.4, "stroke-linejoin": "round"},
    "mean": {"fill": "none", "stroke": "ink", "stroke-width": 2, "stroke-linejoin": "round"},
    "base": {"fill": "none", "stroke": "ink 17"},
    "zero": {"fill": "none", "stroke": "muted", "stroke-opacity": 0.5, "stroke-dasharray": "1 3"},
    "dashes": {"fill": "none", "stroke": "muted", "stroke-width": 1.2, "stroke-dasharray": "3 2.5"},
    "flight": {"fill": "none", "stroke": "rank", "stroke-width": 2.5, "stroke-linecap": "round"},
    "past": {"fill": "none", "stroke": "rank", "stroke-width": 2.5, "stroke-opacity": 0.6},
    "answer": {"fill": "none", "stroke": "muted", "stroke-width": 2.5},
    "wrong": {"fill": "none", "stroke": "warning", "stroke-width": 2.5},
    "lost": {
        "fill": "none",
        "stroke": "warning",
        "stroke-width": 2.5,
        "stroke-linecap": "round",
        "stroke-dasharray": "2 7",
    },
    "arc": {"fill": "none", "stroke": "ink", "stroke-width": 1.6, "stroke-dasharray": "4 4"},
    "cross": {"fill": "none", "stroke": "warning", "stroke-width": 4},
    # text
    "name": {"fill": "ink", "font-size": 13.5, "font-weight": 700},
    "key": {"fill": "ink", "font-size": 13, "font-weight": 700, "font-family": "code", **_HALO},
    "words": {"fill": "muted", "font-size": 12},
    "description": {"fill": "ink", "font-size": 12},
    "small": {"fill": "muted", "font-size": 11},
    "worth": {"fill": "ink", "font-size": 11, "font-family": "code", **_HALO},
    "size": {"fill": "muted", "font-size": 11, **_HALO},
    "tick": {"fill": "muted", "font-size": 10.5},
    "caption": {"fill": "muted", "font-size": 12, "font-weight": 600},
    "place": {"fill": "muted", "font-size": 12, "font-weight": 600, **_HALO},
    "chunk": {
        "fill": "ink",
        "stroke": "paper",
        "stroke-width": 3.5,
        "paint-order": "stroke",
        "stroke-linejoin": "round",
        "font-size": 14,
        "font-weight": 700,
        "pointer-events": "none",
    },
    "figure": {"fill": "ink", "font-size": 18, "font-weight": 700},
    "count": {"fill": "ink", "font-size": 10.5},
    "cell": {
        "fill": "ink",
        "stroke": "paper",
        "stroke-width": 2.5,
        "stroke-opacity": 0.7,
        "paint-order": "stroke",
        "stroke-linejoin": "round",
        "font-size": 11.5,
        "font-weight": 600,
        "pointer-events": "none",
    },
    "version": {"fill": "ink", "font-size": 12.5, "font-weight": 700},
    "reversed": {"fill": "paper", "font-size": 12.5, "font-weight": 700},
    "label": {"fill": "label", "font-size": 11, "font-weight": 700},
    "number": {"fill": "label", "font-size": 21, "font-weight": 700},
    "hollow": {"fill": "ink", "font-size": 21, "font-weight": 700},
    "strong": {"fill": "ink", "font-size": 12.5, "font-weight": 700},
    "late": {"fill": "warning", "font-size": 12, "font-weight": 700, **_HALO},
}
