"""The browser's half of each view as one script and one style sheet.

The files of js/ are ordinary ES modules that import each other: browsers, Node and editors run
them as they are. A widget and a stand-alone page need one script that works wherever it is put,
offline too: ``_joined`` makes each module a function's body, after those that it imports.
"""

from __future__ import annotations

from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from distkit.views.scene.theme import theme

#: The format of the pictures that painters get. One that meets a newer format says so.
FORMAT = 1

_FOLDER = Path(__file__).parents[1] / "js"

#: The style sheets of views that need more than their own.
_SHEETS = {
    "compare": ("sheet", "scene", "compare"),
    "scene": ("sheet", "scene"),
    "concept": ("prediction", "concept"),
}


@cache
def esm(view: str) -> str:
    """The script of a widget: the module of a view, "timeline" or "cockpit", and all it needs."""
    render = f"$render.renders(${view}.{view.title()}, {FORMAT})"
    return _widget(_joined(view, "render", "late"), render)


def esm_of(file: Path) -> str:
    """The script of a widget: a file that has a function ``render`` and imports nothing."""
    return _widget(f"{_joined('late')}\n{file.read_text(encoding='utf-8')}", "render")


def _widget(script: str, render: str) -> str:
    return f"{script}\nexport default {{ initialize: $late.initialize, render: {render} }};\n"


@cache
def page_script(*views: str) -> str:
    """The script of a page: the modules of its views, and what opens them."""
    classes = ", ".join(f"{view.title()}: ${view}.{view.title()}" for view in views)
    return f"{_joined(*views, 'page')}\n$page.open({{ {classes} }}, {FORMAT});\n"


def with_theme(picture: dict[str, Any]) -> dict[str, Any]:
    """A picture with what every painter needs besides: colours, sizes, and its format."""
    return {**picture, "theme": theme(), "format": FORMAT}


@cache
def css(*views: str) -> str:
    """The style sheet of some views: what all share, and their own, each once."""
    sheets = dict.fromkeys(["timeline", *(name for v in views for name in _SHEETS.get(v, (v,)))])
    return "\n".join(_text(f"{name}.css") for name in sheets)


def _joined(*names: str) -> str:
    """Modules and all that they import, each once, as one script without imports and exports."""
    scopes: dict[str, str] = {}
    imports: dict[str, list[str]] = {}
    left = list(names)
    while left:
        if (name := left.pop()) not in scopes:
            scopes[name], imports[name] = _scope(name)
            left += imports[name]
    return "\n".join(scopes[name] for name in TopologicalSorter(imports).static_order())


def _scope(name: str) -> tuple[str, list[str]]:
    """A module as a constant that has its exports, and the names of the modules that it imports.

    Modules of js/ write an import as ``import { h } from "./dom.js";``, on several lines if they
    like, and an export as the word ``export`` before a declaration, at the beginning of a line.
    """
    imports, exports, lines = [], [], []
    for line in _text(f"{name}.js").splitlines():
        if line.startswith("import "):
            line = line.replace("import", "const", 1)
        if line.startswith("export "):
            line = line.removeprefix("export ")
            exports.append(line.split(maxsplit=2)[1].partition("(")[0])
        before, found, path = line.partition('} from "./')
        if found:
            imports.append(path.removesuffix('.js";'))
            line = f"{before}}} = {_constant(imports[-1])};"
        lines.append(line)
    body = "\n".join(lines)
    return (
        f"const {_constant(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();",
        imports,
    )


def _constant(name: str) -> str:
    return f"${name.replace('/', '_')}"


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
