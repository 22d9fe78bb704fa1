"""How large distkit is, and how its modules hang together. Reads the source, runs none of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure

ROOT = Path(__file__).resolve().parents[1]

#: Why the limits of size are not reached.
GROWN = "the limit is for distkit without strategies, hosts, GPUs and the course"
PAINTED = "five views flow with the page or have too many marks for a scene: decision 39"


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Count; the same tree gives the same numbers, so ``reps`` do not matter."""
    package, skip = ROOT / "distkit", "# fmt: " + "skip"
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    modules = {module_name(path, ROOT): ast.parse(text) for path, text in texts.items()}
    scripts = [path for path in sorted(package.rglob("*.js")) if "vendor" not in path.parts]
    lines = [line for path in scripts for line in path.read_text(encoding="utf-8").splitlines()]
    tests = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/**/*.py"))]
    circles = import_circles(imports(modules))
    methods, data = public_names([modules["distkit.cluster.runs.run"]], "Run")
    for circle in circles:
        say(f"house: a circle of imports: {', '.join(circle)}")
    say(f"house: on Run: {', '.join(methods)}; data: {', '.join(data)}")
    sizes = {name: statements(tree) for name, tree in modules.items()}
    rooms = by_room(sizes)
    say("house: statements by room: " + ", ".join(f"{n} {size}" for n, size in rooms.items()))
    figures = [
        _figure("Python without docstrings", "statements", sum(sizes.values()), 16_500, 15_000),
        _figure("JavaScript without vendor", "lines", len(lines), 4_300, 3_500),
        _figure("longest line of JavaScript", "columns", max(map(len, lines), default=0), 100),
        _figure("Python files", "files", len(texts), 190, 160),
        _figure(
            "largest circle of imports, lazy ones counted",
            "modules",
            max(map(len, circles), default=0),
            6,
            0,
        ),
        _figure(
            f"{skip}, those in tests/ counted",
            "lines",
            sum(text.count(skip) for text in [*texts.values(), *tests]),
            60,
            30,
        ),
        _figure("methods and properties on Run without _", "names", len(methods)),
    ]
    details = {"circles": circles, "Run": [methods, data], "rooms": rooms, "statements": sizes}
    return figures, details


def _figure(
    name: str, unit: str, value: int, must: float | None = None, aim: float | None = None
) -> Figure:
    why = {"statements": GROWN, "files": GROWN, "lines": PAINTED}
    note = why.get(unit, "") if must and value > must else ""
    return Figure(f"distkit/: {name}", unit, value, must=must, aim=aim, absolute=True, note=note)


def module_name(path: Path, root: Path) -> str:
    """A file's name in an import.

    >>> module_name(Path("/here/distkit/views/__init__.py"), Path("/here"))
    'distkit.views'
    """
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree: ast.Module) -> int:
    """The statements of a module without its docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(tree))
    docstrings = sum(
        isinstance(n, documented) and ast.get_docstring(n, clean=False) is not None for n in nodes
    )
    return sum(isinstance(n, ast.stmt) for n in nodes) - docstrings


def by_room(sizes: Mapping[str, int]) -> dict[str, int]:
    """The statements of each folder and file directly below the package, the largest first.

    >>> by_room({"p": 1, "p.a": 2, "p.b": 1, "p.b.c": 5})
    {'b': 6, 'a': 2, 'p': 1}
    """
    rooms = Counter[str]()
    for name, size in sizes.items():
        rooms[[*name.split("."), name][1]] += size
    return dict(rooms.most_common())


def imports(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which of these modules each one imports, at its top, in functions or for type checkers."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found[name].add(full if full in modules else node.module)
    return {name: {n for n in names if n in modules and n != name} for name, names in found.items()}


def import_circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or not; the largest first.

    Two modules are in one circle if each reaches the other.

    >>> import_circles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []})
    [['a', 'b', 'c']]
    """
    reached = {name: _reached(name, graph) for name in graph}
    circles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(list, circles), key=lambda circle: (-len(circle), circle))


def _reached(start: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    """What is imported from here on; the start only where a circle leads back to it."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph[name]
    return found


def public_names(modules: Iterable[ast.Module], name: str) -> tuple[list[str], list[str]]:
    """The methods and properties of a class, and its data, that do not begin with an underscore."""
    (found,) = (
        n for tree in modules for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name
    )
    methods = {n.name for n in found.body if isinstance(n, ast.FunctionDef)}
    fields = {
        n.target.id
        for n in found.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assigned = {
        n.attr
        for n in ast.walk(found)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and ast.unparse(n.value) == "self"
    }
    public = [{n for n in names if not n.startswith("_")} for names in (methods, fields | assigned)]
    return sorted(public[0]), sorted(public[1])
