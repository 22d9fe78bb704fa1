"""The counting behind ``distkit bench house``, on made-up sources."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks import house


def test_a_file_is_named_as_it_is_imported() -> None:
    root = Path("/here")
    assert house.module_name(root / "distkit/views/__init__.py", root) == "distkit.views"
    assert house.module_name(root / "distkit/views/stage.py", root) == "distkit.views.stage"


def test_docstrings_are_no_statements_and_other_texts_are() -> None:
    source = """
'About.'
if x:
    y = 1
    'a text, no docstring'
class A:
    'doc'
    async def f(self):
        'doc'
        return 1
"""
    assert house.statements(ast.parse(source)) == 6


SOURCES = {
    "p": "from p.a import f",
    "p.a": "import os\ndef f():\n    from p import b",
    "p.b": "if TYPE_CHECKING:\n    from p.c import C",
    "p.c": "import p.a",
    "p.d": "from p.d_helper import x\nfrom elsewhere import y",
    "p.d_helper": "import p.d",
    "p.e": "from p.a import f",
}


def test_lazy_and_type_checking_imports_count() -> None:
    graph = house.imports({name: ast.parse(text) for name, text in SOURCES.items()})
    assert graph["p.a"] == {"p.b"} and graph["p.b"] == {"p.c"} and graph["p.e"] == {"p.a"}
    assert house.import_circles(graph) == [["p.a", "p.b", "p.c"], ["p.d", "p.d_helper"]]
    assert house.import_circles({"a": ["b"], "b": []}) == []


def test_names_with_an_underscore_are_nobodys_but_the_classes() -> None:
    source = """
class Run:
    name: str
    def __init__(self, run):
        self.seconds, self._began = 0.0, 1.0
        run.other = 1
    def wait(self): ...
    @property
    def trace(self): ...
    def _end(self): ...
"""
    modules = [ast.parse("class Walk: ..."), ast.parse(source)]
    assert house.public_names(modules, "Run") == (["trace", "wait"], ["name", "seconds"])


def test_the_tree_itself_is_counted() -> None:
    figures, details = house.measure(1, lambda line: None)
    assert all(f.value is not None and f.value >= 0 for f in figures)
    assert sum(details["statements"].values()) == figures[0].value
