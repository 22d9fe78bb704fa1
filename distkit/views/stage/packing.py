"""The stage in fewer letters, as it travels to the browser; js/unfold.js is the other half.

Many messages carry the same piece of a tensor, and all beats have the same few names of facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from distkit.views.scene.frame import Json


def folded(picture: Json) -> Json:
    """A picture of the stage with each piece told once, and rows instead of objects.

    ``beats`` and ``changes`` become ``{"shapes": [[name, …], …], "rows": [[shape, value, …], …]}``,
    and what a rank holds a number among ``pieces``; there contributors are ranges: first, last,
    first, last ….

    >>> folded({"beats": [{"begin": 0.5}], "changes": []})["beats"]
    {'shapes': [['begin']], 'rows': [[0, 0.5]]}
    """
    numbers: dict[str, int] = {}

    def number(piece: Json) -> int:
        return numbers.setdefault(json.dumps(_ranged(piece)), len(numbers))

    beats = [
        {**beat, "piece": number(beat["piece"])} if "piece" in beat else beat
        for beat in picture["beats"]
    ]
    changes = [
        {**change, "pieces": [number(piece) for piece in change["pieces"]]}
        for change in picture["changes"]
    ]
    return {
        **picture,
        "beats": _rows(beats),
        "changes": _rows(changes),
        "pieces": [json.loads(piece) for piece in numbers],
    }


def _ranged(piece: Json) -> Json:
    return {name: _ranges(its) if name in ("sure", "maybe") else its for name, its in piece.items()}


def _ranges(ranks: list[int]) -> list[int]:
    """Sorted numbers as ranges.

    >>> _ranges([1, 2, 3, 7])
    [1, 3, 7, 7]
    """
    runs = (
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    )
    return [end for run in runs for end in (run[0], run[-1])]


def _rows(objects: Iterable[Json]) -> Json:
    shapes: dict[tuple[str, ...], int] = {}
    rows = [
        [shapes.setdefault(tuple(one), len(shapes)), *map(_short, one.values())] for one in objects
    ]
    return {"shapes": [list(names) for names in shapes], "rows": rows}


def _short(value: Any) -> Any:
    """Times to a tenth of a microsecond."""
    return round(value, 7) if isinstance(value, float) else value
