"""A training function of a notebook or a file, as a script for torchrun that needs no distkit.

The script has the function and what it refers to: the notebook's other functions and constants,
and the pages of distkit, which are plain torch. Nothing is executed: names are followed from file
to file. What only records or shows becomes a stand-in that does nothing.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import distkit
from distkit.errors import DistkitError
from distkit.experiments.fingerprint import global_names

#: What a script has instead of that which records, shows, or explains.
STAND_INS = {
    ("distkit.recording.progress", "progress"): (
        "def progress(iterable, total=None):\n    return iter(iterable)",
        "",
    ),
    ("distkit.recording.recorder", "mark"): (
        "@contextlib.contextmanager\ndef mark(label):\n    yield",
        "import contextlib",
    ),
    ("distkit.errors", "DistkitError"): ("class DistkitError(Exception):\n    pass", ""),
}
#: These parts of distkit are more than pages: a script that needs them needs distkit.
KEPT = ("cluster", "experiments", "kvstore", "recording", "strategies", "views")

#: A statement's place: its module, "" for the reader's own, and its number there.
Place = tuple[str, int]


def export(source: Path, name: str) -> str:
    """The text of a script that runs a function under torchrun.

    Args:
        source: a notebook, or a Python file.
        name: of a function at its top.

    Raises:
        DistkitError: there is no such file or function, it cannot be parsed, or it needs a part
            of distkit that is no plain torch; the message names it.
    """
    own = Module("", _read(source), str(source))
    if not isinstance(own.statement(name), ast.FunctionDef):
        known = [n for n in own.defined if isinstance(own.statement(n), ast.FunctionDef)]
        raise DistkitError(
            f"{source}: there is no function {name!r} at the top. "
            f"It has {', '.join(known) or 'none'}."
        )
    writer = _Writer(own)
    writer.need(own, name)
    return writer.text(name, source.name)


def _read(source: Path) -> str:
    try:
        text = source.read_text("utf-8")
        if source.suffix != ".ipynb":
            return text
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        return "\n\n\n".join(_plain("".join(c["source"])) for c in cells)
    except OSError as error:
        raise DistkitError(f"{source} cannot be read ({error.strerror}).") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DistkitError(f"{source} is no notebook ({error}).") from error


def _plain(cell: str) -> str:
    """A cell without IPython's own lines; one for another language, or the ranks, is left out."""
    if cell.lstrip().startswith("%%"):
        return ""
    return re.sub(r"(?m)^[ \t]*[%!?].*$", "", cell)


@dataclass
class Module:
    """The statements at the top of a file, by the names that they define."""

    name: str
    source: str
    path: str
    used: set[int] = field(default_factory=set)

    @cached_property
    def body(self) -> list[ast.stmt]:
        """The statements, those in ``if`` and ``try`` of the top excluded."""
        try:
            return ast.parse(self.source).body
        except SyntaxError as error:
            raise DistkitError(f"{self.path}, line {error.lineno}: {error.msg}.") from error

    @cached_property
    def defined(self) -> dict[str, int]:
        """The number of the last statement that defines each name."""
        return {name: i for i, node in enumerate(self.body) for name in _names(node)}

    def statement(self, name: str) -> ast.stmt | None:
        """What defines a name; None if nothing does."""
        return self.body[self.defined[name]] if name in self.defined else None


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((a.asname or a.name.partition(".")[0]) for a in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


class _Writer:
    """Collects what is needed, each statement after those that it refers to."""

    def __init__(self, own: Module) -> None:
        self.modules = {"": own}
        self.imports: set[str] = set()
        self.parts: list[str] = []
        self.homes: dict[str, str] = {}

    def need(self, module: Module, name: str) -> None:
        """Take in what a name of a module stands for, if that is not a builtin."""
        node, stand_in = module.statement(name), STAND_INS.get((module.name, name))
        if stand_in is not None:
            self._stand_in(*stand_in)
            return
        if node is None:
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(module, node, name)
            return
        number = module.defined[name]
        if number in module.used:
            return
        module.used.add(number)
        if module.name.split(".")[1:2] and module.name.split(".")[1] in KEPT:
            raise self._refused(f"{module.name}.{name}")
        for one in _names(node):
            home = self.homes.setdefault(one, module.name)
            if home != module.name:
                raise DistkitError(
                    f"{one} is defined in {home or 'the source'} and in {module.name}: "
                    "give yours another name, and export again."
                )
        self.parts.append(self._written(module, node))

    def _import(self, module: Module, node: ast.Import | ast.ImportFrom, name: str) -> None:
        alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distkit"):
            self._of_distkit([*str(node.module).split("."), alias.name])
        elif not alias.name.startswith("distkit"):
            one = (
                ast.ImportFrom(node.module, [alias], 0)
                if isinstance(node, ast.ImportFrom)
                else (ast.Import([alias]))
            )
            self.imports.add(ast.unparse(one))

    def _of_distkit(self, path: list[str]) -> str:
        """Take in what ``distkit.a.b`` stands for; the name it has in the script."""
        home, name = _located(path)
        module = self._module(home)
        node = module.statement(name)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("distkit"):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self._of_distkit([*str(node.module).split("."), alias.name])
        if node is None:
            raise self._refused(".".join(path))
        self.need(module, name)
        return name

    def _stand_in(self, text: str, imported: str) -> None:
        if text not in self.parts:
            self.imports |= {imported} - {""}
            self.parts.append(text)

    def _module(self, name: str) -> Module:
        if name not in self.modules:
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                raise self._refused(name)
            text = Path(spec.origin).read_text("utf-8")
            self.modules[name] = Module(name, text, spec.origin)
        return self.modules[name]

    def _refused(self, what: str) -> DistkitError:
        return DistkitError(
            f"the function needs {what}, which is no plain torch: a script of its own cannot have "
            "it. Take it out, or run the function with distkit."
        )

    def _written(self, module: Module, node: ast.stmt) -> str:
        """A statement as it is in its file, but for ``dk.name``, which becomes ``name``."""
        code = compile(ast.Module([node], []), module.path, "exec", _ANNOTATIONS, dont_inherit=True)
        aliases = {n for n in global_names(code) if _is_distkit(module.statement(n))}
        changes = []
        for chain in _chains(node, aliases):
            if (path := _dotted(chain)) is not None:
                changes.append((chain, self._of_distkit(["distkit", *path[1:]])))
        for name in global_names(code):
            if name not in aliases:
                self.need(module, name)
        return _changed(module.source, node, changes)

    def text(self, name: str, source: str) -> str:
        """The whole script."""
        needed = {"ast", "sys", "torch", "torch.distributed as dist"}
        imports = {*self.imports, *(f"import {module}" for module in needed)}
        listed = "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line)))
        body = "\n\n\n".join(self.parts)
        head, end = _HEAD.format(name=name, source=source), _MAIN.format(name=name)
        return f"{head}\n{listed}\n\n\n{body}{end}"


_ANNOTATIONS = 0x1000000  # from __future__ import annotations

_HEAD = '''"""{name}() of {source}, for torchrun: exported by distkit, which it does not need.

    torchrun --nproc-per-node=4 THIS_FILE [PARAMETER=VALUE ...]
"""

from __future__ import annotations
'''

_MAIN = """

if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        result = {name}(**{{k: ast.literal_eval(v) for k, v in given.items()}})
        if result is not None:
            print(f"rank {{dist.get_rank()}}: {{result}}\\n", end="", flush=True)
    finally:
        dist.destroy_process_group()
"""


def _is_distkit(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Import) and any(a.name == "distkit" for a in node.names)


def _chains(node: ast.AST, aliases: set[str]) -> Iterator[ast.Attribute]:
    """The attributes of distkit in a statement, each as far as distkit goes."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            path = _dotted(child)
            if path is not None and path[0] in aliases and _ends(path[1:]):
                yield child


def _dotted(node: ast.expr) -> list[str] | None:
    """The names of ``a.b.c``; None for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if not isinstance(node, ast.Attribute) or (path := _dotted(node.value)) is None:
        return None
    return [*path, node.attr]


def _ends(path: list[str]) -> bool:
    """True if a path of attributes below distkit leads to a name in a module, and no further."""
    if len(path) == 1:
        return path[0] not in distkit._MODULES
    below = ".".join(["distkit", *path[:-1]])
    return path[0] in distkit._MODULES and find_spec(below) is not None


def _located(path: list[str]) -> tuple[str, str]:
    """The module and the name of what a path from ``distkit`` on stands for."""
    if len(path) == 2:
        return str(distkit._home.get(path[1], "distkit")), path[1]
    return ".".join(path[:-1]), path[-1]


def _changed(source: str, node: ast.stmt, changes: list[tuple[ast.Attribute, str]]) -> str:
    """A statement's text, its decorators included, with some expressions replaced."""
    lines = [line.encode() for line in source.splitlines()]
    for old, new in sorted(changes, key=lambda c: (c[0].lineno, c[0].col_offset), reverse=True):
        line, end = lines[old.lineno - 1], old.end_col_offset or 0
        lines[old.lineno - 1] = line[: old.col_offset] + new.encode() + line[end:]
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return b"\n".join(lines[first - 1 : node.end_lineno]).decode()
