"""The browser's half of the timeline as one ES module and one style sheet."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "js"

#: In the order of their imports. They are ordinary modules that import each other; a widget
#: and a stand-alone page need them in one piece.
_MODULES = ("numbers", "dom", "store", "layout", "painter", "tooltip", "around", "timeline")
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=class|const|function)", re.MULTILINE)


@cache
def esm() -> str:
    """The modules joined into one, which exports ``{ render }``."""
    parts = (_text(f"{name}.js") for name in _MODULES)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", part)) for part in parts)


@cache
def css() -> str:
    """The style sheet of the timeline."""
    return _text("timeline.css")


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
