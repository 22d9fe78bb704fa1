"""The browser's half of each view as one ES module and one style sheet."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distkit.views.scene.theme import theme

#: The format of the pictures that painters get. One that meets a newer format says so.
FORMAT = 1

_FOLDER = Path(__file__).parents[1] / "js"

#: In the order of their imports. They are ordinary modules that import each other; a widget
#: and a stand-alone page need them in one piece. The last one has the view's class.
_BASE = ("vendor/d3", "numbers", "dom", "repaint")
_TIMELINE = (
    *_BASE,
    "colors",
    "columns",
    "store",
    "layout",
    "painter",
    "arrows",
    "strips",
    "look",
    "minimap",
    "gestures",
    "overlay",
    "tooltip",
    "cone",
    "query",
    "lenses",
    "around",
    "timeline",
)
_MODULES = {
    "timeline": _TIMELINE,
    "cockpit": (*_TIMELINE, "python", "source", "cards", "controls", "talk", "marks", "cockpit"),
    "tensors": (*_BASE, "tensorsparts", "tensors"),
    "gradients": (*_BASE, "tensorsparts", "gradientscharts", "gradients"),
    "compare": (
        *_BASE,
        "colors",
        "columns",
        "store",
        "layout",
        "painter",
        "arrows",
        "strips",
        "look",
        "gestures",
        "overlay",
        "around",
        "tensorsparts",
        "comparecharts",
        "comparepanels",
        "compare",
    ),
    "status": ("dom", "status"),
    "scene": (*_BASE, "colors", "tensorsparts", "player", "marks", "beside", "scene"),
}
#: The style sheets of views that need more than their own.
_SHEETS = {
    "gradients": ("tensors", "gradients"),
    "compare": ("tensors", "compare"),
    "scene": ("tensors", "scene"),
}
#: Signs that an address holds as they are.
_PLAIN = " !\"$&'()*+,-./:;<=>?@[]^_`{|}~"
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_FROM = re.compile(r'\bfrom "\./')
_EXPORT = re.compile(r"^export (?=class|const|function)", re.MULTILINE)
_ENTRY = """
export default {{ render: renders({view}, {format}) }};
"""


@cache
def esm(view: str) -> str:
    """The modules of a view, "timeline" or "cockpit", joined into one that exports ``render``."""
    names = [*_MODULES[view], "render"]
    parts = [_EXPORT.sub("", _IMPORT.sub("", _text(f"{name}.js"))) for name in names]
    return "\n".join([*parts, _ENTRY.format(view=view.title(), format=FORMAT)])


def modules(*names: str) -> dict[str, str]:
    """Modules and all that they import, each once, as an import map whose addresses hold them.

    Args:
        names: of the modules, as "timeline"; each is imported as "distkit/timeline.js".
    """
    found: dict[str, str] = {}
    left = list(names)
    while left:
        name = left.pop()
        if (key := f"distkit/{name}.js") not in found:
            text = _FROM.sub('from "distkit/', _text(f"{name}.js"))
            found[key] = f"data:text/javascript;charset=utf-8,{quote(text, safe=_PLAIN)}"
            left += re.findall(r'^import [^;]* from "distkit/(\w+)\.js";', text, re.MULTILINE)
    return found


def vendor() -> str:
    """d3, as a script that defines ``d3``."""
    return _text("vendor/d3.js")


def dressed(picture: dict[str, Any]) -> dict[str, Any]:
    """A picture with what every painter needs besides: colours, sizes, and its format."""
    return {**picture, "theme": theme(), "format": FORMAT}


@cache
def css(*views: str) -> str:
    """The style sheet of some views: what all share, and their own, each once."""
    sheets = dict.fromkeys(["timeline", *(name for v in views for name in _SHEETS.get(v, (v,)))])
    return "\n".join(_text(f"{name}.css") for name in sheets)


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
