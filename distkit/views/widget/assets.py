"""Bundles the browser part of each view into one script and one style sheet.

The files of js/ are ordinary ES modules, which browsers, Node and editors can use unchanged.
Widgets and stand-alone pages need a single script that works offline, so ``_bundle`` turns each
module into a function, in dependency order.
"""

from __future__ import annotations

import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from distkit.views.scene.theme import theme

#: Modules of js/ write imports as ``import { h } from "./dom.js";``, possibly on several lines, and
#: exports as ``export`` before a declaration, at the start of a line.
_IMPORT = re.compile(r'^import (\{[^}]+\}) from "\./([\w/]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export \w+ (\w+)", re.MULTILINE)

_FOLDER = Path(__file__).parents[1] / "js"

#: Style sheets of views that need several.
_SHEETS = {
    "compare": ("scene", "compare"),
    "concept": ("prediction", "concept"),
}


@cache
def esm(view: str) -> str:
    """Return the script of a widget, bundled from a view's module such as "timeline"."""
    return _widget(_bundle(view, "render", "late"), f"$render.renders(${view}.{view.title()})")


def esm_of(file: Path) -> str:
    """Return the script of a widget from a file that defines ``render`` and has no imports."""
    return _widget(f"{_bundle('late')}\n{file.read_text(encoding='utf-8')}", "render")


def _widget(script: str, render: str) -> str:
    return f"{script}\nexport default {{ initialize: $late.initialize, render: {render} }};\n"


@cache
def page_script(*views: str) -> str:
    """Return the script that opens the views of a page."""
    classes = ", ".join(f"{view.title()}: ${view}.{view.title()}" for view in views)
    return f"{_bundle(*views, 'page')}\n$page.open({{ {classes} }});\n"


def with_theme(picture: dict[str, Any]) -> dict[str, Any]:
    """Return a picture with colors and sizes."""
    return {**picture, "theme": theme()}


@cache
def css(*views: str) -> str:
    """Return the combined style sheet of the given views."""
    sheets = dict.fromkeys(["timeline", *(name for v in views for name in _SHEETS.get(v, (v,)))])
    return "\n".join(_text(f"{name}.css") for name in sheets)


def _bundle(*names: str) -> str:
    """Bundle modules and their imports into one script without imports and exports."""
    scopes: dict[str, str] = {}
    imports: dict[str, list[str]] = {}
    pending = list(names)
    while pending:
        if (name := pending.pop()) not in scopes:
            scopes[name], imports[name] = _scope(name)
            pending += imports[name]
    return "\n".join(scopes[name] for name in TopologicalSorter(imports).static_order())


def _scope(name: str) -> tuple[str, list[str]]:
    """Return a module as a constant with its exports, and the names of its imports."""
    text = _text(f"{name}.js")
    imports = [path for _, path in _IMPORT.findall(text)]
    body = _IMPORT.sub(lambda found: f"const {found[1]} = {_constant(found[2])};", text)
    exports = ", ".join(_EXPORT.findall(body))
    body = _EXPORT.sub(lambda found: found[0].removeprefix("export "), body)
    return (
        f"const {_constant(name)} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();",
        imports,
    )


def _constant(name: str) -> str:
    return f"${name.replace('/', '_')}"


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
