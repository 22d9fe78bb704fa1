"""Size of distkit's packages, and import cycles between its modules, from the parsed source."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import distkit
from benchmarks.figure import Figure

ROOT = Path(__file__).resolve().parents[1]


class Line(NamedTuple):
    """The maximum size of a package, and its target."""

    limit: int
    target: int


#: Statements in each folder, without subfolders that have a separate entry. A test fails when a
#: folder exceeds its limit. A commit that makes a package smaller lowers its limit; a package that
#: moves keeps its limit.
LINES = {
    "distkit": Line(826, 900),
    "distkit/algorithms": Line(1_089, 1_300),
    "distkit/cluster": Line(3_090, 3_000),
    "distkit/diagnosis": Line(1_703, 1_800),
    "distkit/kvstore": Line(1_637, 1_700),
    "distkit/recording": Line(1_538, 1_600),
    "distkit/trace": Line(901, 700),
    "distkit/views": Line(3_647, 3_800),
    "companions/distkit_course": Line(1_316, 1_300),
    "companions/distkit_examples": Line(351, 320),
    "companions/distkit_experiments": Line(772, 800),
    "companions/distkit_hosts": Line(3_184, 3_200),
    "companions/distkit_parallel": Line(576, 600),
    "companions/distkit_simulation": Line(1_311, 1_400),
    "companions/distkit_strategies": Line(1_691, 1_700),
    "notebooks/course": Line(1_252, 1_200),
    "tests": Line(16_409, 16_000),
    "tests/stress": Line(3_539, 4_000),
    "benchmarks": Line(1_987, 2_000),
}
#: Folders that are not part of the product.
NON_PRODUCT = ("tests", "benchmarks")
#: Limits and targets of sums and other counts.
TOTALS = {
    "all of distkit": Line(14_431, 15_000),
    "the whole product": Line(24_884, 25_000),
    "lines of JavaScript": Line(3_978, 4_300),
    "files in distkit": Line(145, 150),
    "names at the top level": Line(27, 23),
}


def measure(reps: int, log: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Count sizes and cycles; ``reps`` has no effect."""
    modules = {
        module_name(path, root): ast.parse(path.read_text(encoding="utf-8"))
        for root, folder in ((ROOT, "distkit"), (ROOT / "companions", "."))
        for path in sorted(root.joinpath(folder).rglob("*.py"))
    }
    cycles = import_cycles(imports(modules))
    for cycle in cycles:
        log(f"house: import cycle: {', '.join(cycle)}")
    sizes = packages(ROOT)
    counts, known = sizes | totals(ROOT, sizes), LINES | TOTALS
    for row in table(counts, known):
        log(f"house: {row}")
    figures = [
        *(_figure(f"house: {n}", "", counts[n], *known[n]) for n in [*TOTALS, *NON_PRODUCT]),
        _figure(
            "largest import cycle, counting lazy imports",
            "modules",
            max(map(len, cycles), default=0),
            6,
            0,
        ),
    ]
    return figures, {"cycles": cycles, "sizes": counts}


def _figure(
    name: str, unit: str, value: int, limit: float | None = None, target: float | None = None
) -> Figure:
    return Figure(name, unit, value, limit=limit, target=target, absolute=True)


def packages(root: Path) -> dict[str, int]:
    """Return the number of statements in each folder of ``LINES``."""
    counts = Counter(dict.fromkeys(LINES, 0))
    for folder in ("distkit", "companions", "notebooks", "tests", "benchmarks"):
        for path in sorted(root.glob(f"{folder}/**/*.py")):
            counts[package_of(path.relative_to(root))] += size(path)
    return dict(counts)


@cache
def size(path: Path) -> int:
    """Return the number of statements in a file."""
    return statements(ast.parse(path.read_text(encoding="utf-8")))


def package_of(path: Path) -> str:
    """Return the nearest parent folder in ``LINES``, to which the file's statements are added.

    >>> [package_of(Path(p)) for p in ("distkit/cli.py", "distkit/views/scene/svg.py")]
    ['distkit', 'distkit/views']
    """
    return next(folder for folder in map(str, path.parents) if folder in LINES)


def totals(root: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the counts named in ``TOTALS``."""
    product = {name: size for name, size in sizes.items() if not name.startswith(NON_PRODUCT)}
    return {
        "all of distkit": sum(s for name, s in product.items() if name.startswith("distkit")),
        "the whole product": sum(product.values()),
        "lines of JavaScript": len(_javascript(root)),
        "files in distkit": len(list(root.glob("distkit/**/*.py"))),
        "names at the top level": len(distkit.__all__),
    }


def _javascript(root: Path) -> list[str]:
    """Return the lines of JavaScript, without vendored files."""
    scripts = [*root.glob("distkit/**/*.js"), *root.glob("companions/**/*.js")]
    files = [path for path in sorted(scripts) if "vendor" not in path.parts]
    return [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]


def table(counts: Mapping[str, int], lines: Mapping[str, Line]) -> list[str]:
    """Return a table of the packages with size, limit and target.

    >>> table({"distkit/views": 900}, {"distkit/views": Line(1_000, 800)})[1]
    'distkit/views     900  1,000     800'
    """
    width = max(map(len, [*lines, "package"]))
    return [
        f"{'package':{width}} {'now':>7} {'limit':>6} {'target':>7}",
        *(
            f"{name:{width}} {counts[name]:>7,} {line.limit:>6,} {line.target:>7,}"
            for name, line in lines.items()
        ),
    ]


def module_name(path: Path, root: Path) -> str:
    """Return the name under which a file is imported.

    >>> module_name(Path("/here/distkit/views/__init__.py"), Path("/here"))
    'distkit.views'
    """
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree: ast.Module) -> int:
    """Return the number of statements in a module, not counting docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(tree))
    docstrings = sum(
        isinstance(n, documented) and ast.get_docstring(n, clean=False) is not None for n in nodes
    )
    return sum(isinstance(n, ast.stmt) for n in nodes) - docstrings


def imports(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the imports of each module, including those in functions and for type checkers."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                graph[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    graph[name].add(full if full in modules else node.module)
    return {name: {n for n in names if n in modules and n != name} for name, names in graph.items()}


def import_cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or indirectly, largest first.

    Two modules are in one cycle if each reaches the other.

    >>> import_cycles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []})
    [['a', 'b', 'c']]
    """
    reached = {name: _reachable(name, graph) for name in graph}
    cycles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(list, cycles), key=lambda cycle: (-len(cycle), cycle))


def _reachable(start: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    """Return all modules that a module reaches, including itself if it is part of a cycle."""
    reached: set[str] = set()
    pending = list(graph[start])
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += graph[name]
    return reached
