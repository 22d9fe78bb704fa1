"""A view that is a scene: data as timed marks, drawn by the painters that all such views share."""

from __future__ import annotations

from typing import Any

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.scene.painter import to_svg, to_table
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import WholeView


class SceneView(WholeView):
    """A view whose ``_project`` returns what ``distkit.views.scene.marks.picture`` makes."""

    _esm = esm("scene")
    _css = css("scene")

    def _project(self, trace: EventLog) -> Json:
        raise NotImplementedError

    def _changes(self, before: Json, now: Json) -> Json:
        changed: Json = patch(before, now)
        return changed

    def _svg(self) -> str:
        return to_svg(self._data)

    def __repr__(self) -> str:
        return to_table(self._data)


def patch(before: Any, now: Any) -> Any:
    """What a browser that has ``before`` needs to have ``now``; js/scene.js puts it together.

    >>> patch({"a": [1, 2], "b": 3, "c": 4}, {"a": [1, 2, 5], "b": 3, "c": 6})
    {'a': {'keep': 2, 'more': [5]}, 'c': 6}
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return {k: patch(before.get(k), v) for k, v in now.items() if before.get(k) != v}
    if isinstance(before, list) and isinstance(now, list):
        pairs = enumerate(zip(before, now, strict=False))
        keep = next((i for i, (a, b) in pairs if a != b), min(len(before), len(now)))
        return {"keep": keep, "more": now[keep:]}
    return now
