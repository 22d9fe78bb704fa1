"""The statement counts of ``distkit bench house``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import house


def test_module_name_is_the_import_name() -> None:
    root = Path("/here")
    assert house.module_name(root / "distkit/views/__init__.py", root) == "distkit.views"
    assert house.module_name(root / "distkit/views/stage.py", root) == "distkit.views.stage"


def test_docstrings_do_not_count_as_statements() -> None:
    source = """
'About.'
if x:
    y = 1
    'a string, not a docstring'
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
    assert house.import_cycles(graph) == [["p.a", "p.b", "p.c"], ["p.d", "p.d_helper"]]
    assert house.import_cycles({"a": ["b"], "b": []}) == []


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return house.packages(house.ROOT)


def test_no_package_exceeds_its_limit(sizes: dict[str, int]) -> None:
    """A commit that shrinks a package also lowers its limit in benchmarks/house.py."""
    counts = sizes | house.totals(house.ROOT, sizes)
    limits = house.LINES | house.TOTALS
    assert not {name: n for name, n in counts.items() if n > limits[name].limit}


def test_every_statement_is_counted_for_one_package(sizes: dict[str, int]) -> None:
    assert all(house.ROOT.joinpath(folder).is_dir() for folder in house.LINES)
    folders = ("distkit", "companions", "notebooks", "tests", "benchmarks")
    files = (path for folder in folders for path in house.ROOT.glob(f"{folder}/**/*.py"))
    assert sum(house.size(path) for path in files) == sum(sizes.values())


def test_benchmark_prints_table_and_totals() -> None:
    lines: list[str] = []
    figures, _ = house.measure(1, lines.append)
    assert all(f.value is not None and f.value >= 0 for f in figures)
    assert all(any(f": {name} " in line for line in lines) for name in (house.LINES | house.TOTALS))
    assert {"house: all of distkit", "house: tests"} <= {f.name for f in figures}
