"""The browser's half of each view as one ES module and one style sheet."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "js"

#: In the order of their imports. They are ordinary modules that import each other; a widget
#: and a stand-alone page need them in one piece. The last one has the view's class.
_TIMELINE = ("vendor/d3", "numbers", "dom", "columns", "store", "layout", "painter", "arrows",
             "strips", "look", "minimap", "gestures", "overlay", "tooltip", "causes", "query",
             "lenses", "around", "timeline")  # fmt: skip
_MODULES = {
    "timeline": _TIMELINE,
    "cockpit": (*_TIMELINE, "python", "source", "cards", "controls", "talk", "cockpit"),
    "tensors": ("vendor/d3", "numbers", "dom", "tensorsparts", "tensors"),
    "gradients": ("vendor/d3", "numbers", "dom", "tensorsparts", "gradientscharts", "gradients"),
    "stage": ("vendor/d3", "numbers", "dom", "painter", "scene", "script", "stage"),
}
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=class|const|function)", re.MULTILINE)
_ENTRY = """
function render({{ model, el }}) {{
  const view = new {view}(model, el);
  return () => view.dispose();
}}

export default {{ render }};
"""


@cache
def esm(view: str) -> str:
    """The modules of a view, "timeline" or "cockpit", joined into one that exports ``render``."""
    parts = [_EXPORT.sub("", _IMPORT.sub("", _text(f"{name}.js"))) for name in _MODULES[view]]
    return "\n".join([*parts, _ENTRY.format(view=view.title())])


@cache
def css(view: str) -> str:
    """The style sheet of a view: what all share, and its own."""
    sheets = ["timeline.css"] if view == "timeline" else ["timeline.css", f"{view}.css"]
    return "\n".join(map(_text, sheets))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
