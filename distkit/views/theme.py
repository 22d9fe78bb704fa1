"""Colours and sizes of every view, in one place: both painters, JavaScript and SVG, take them here.

One colour per rank, from the palette of Okabe and Ito (2008), which stays distinguishable
with every common form of colour blindness; yellow is darkened for white paper, and the dark
theme's colours are lighter tints of the same hues.
"""

from __future__ import annotations

from typing import Any

RANKS_LIGHT = ("#0072B2", "#E69F00", "#009E73", "#CC79A7",
               "#56B4E9", "#D55E00", "#A89600", "#6B7785")  # fmt: skip
RANKS_DARK = ("#3D95E0", "#F2B233", "#25C296", "#E095C0",
              "#8AD2F7", "#F58A4B", "#DCCB45", "#AAB5C2")  # fmt: skip

#: One colour per trace where several are compared, far from those of the ranks; in curves with a
#: dash of its own as well.
TRACES_LIGHT = ("#3B4754", "#8250C4", "#00838F", "#B3541E",
                "#5C7F00", "#AD1F73", "#1F5FBF", "#7A6A55")  # fmt: skip
TRACES_DARK = ("#C9D3DD", "#B793F0", "#4CC5CF", "#F0965F",
               "#A8CC4A", "#EF7FB8", "#7FB0FF", "#C8B8A0")  # fmt: skip

#: Failures: always with a hatch and a cross as well, never by colour alone.
WARNING_LIGHT, WARNING_DARK = "#C4314B", "#FF6B81"

#: Text on white paper, for the static painters.
INK, GRAY = "#17202a", "#5b6773"

#: Sizes in CSS pixels.
SIZES = {
    "row": 18,  # a bar of communication
    "mark": 15,  # a bar of marked computation
    "gap": 3,  # between the rows of one lane
    "pad": 6,  # above and below the rows of a lane
    "pitch": 124,  # from lane to lane, when there is room
    "height": 380,  # of all lanes together, when there is room
    "min_gap": 14,  # between two lanes
    "max_gap": 84,
    "max_rows": 110,  # rows of one lane are squeezed into this height
    "axis": 34,  # height of the time axis
}


def rank_color(lane: int, *, dark: bool = False) -> str:
    """The colour of the n-th lane; after eight lanes the colours repeat."""
    palette = RANKS_DARK if dark else RANKS_LIGHT
    return palette[lane % len(palette)]


def theme() -> dict[str, Any]:
    """Everything above as plain data, for JavaScript."""
    return {
        "light": {"ranks": RANKS_LIGHT, "traces": TRACES_LIGHT, "warning": WARNING_LIGHT},
        "dark": {"ranks": RANKS_DARK, "traces": TRACES_DARK, "warning": WARNING_DARK},
        "sizes": SIZES,
    }
