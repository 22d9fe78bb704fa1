"""A training function of a notebook or a file, as a script for torchrun that needs no distkit.

The script has the function and what it refers to: the notebook's other functions and constants,
and the pages of distkit, which are plain torch. Nothing is executed: names are followed from file
to file. What only records or shows becomes a stand-in that does nothing.
"""

from __future__ import annotations

import ast
import builtins
import dis
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

import distkit
from distkit.errors import DistkitError
from distkit_experiments.fingerprint import global_names

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
        """The statements at the top, but for what only a file that is run itself does."""
        try:
            return [node for node in ast.parse(self.source).body if not _is_main(node)]
        except SyntaxError as error:
            raise DistkitError(f"{self.path}, line {error.lineno}: {error.msg}.") from error

    @cached_property
    def defined(self) -> dict[str, list[int]]:
        """The numbers of the statements that define or change what each name stands for."""
        found: dict[str, list[int]] = {}
        imported = set[str]()
        for number, node in enumerate(self.body):
            changed = {name for name in _called(node) if name in found} - imported
            for name in {*_names(node), *_set(node)} | changed:
                found.setdefault(name, []).append(number)
            imported.update(_names(node) if isinstance(node, _IMPORTS) else ())
        return found

    def statement(self, name: str) -> ast.stmt | None:
        """What defines a name at last; None if nothing does."""
        return self.body[self.defined[name][-1]] if name in self.defined else None

    def needed(self, name: str, at: int) -> list[int]:
        """The statements that make what a name stands for at a statement, and in the end.

        A function, a class or an import replaces all that the name stood for before.
        """
        before = [n for n in self.defined[name] if n < at]
        return sorted({*self._latest(before), *self._latest(self.defined[name])})

    def _latest(self, numbers: list[int]) -> list[int]:
        fresh = [i for i, n in enumerate(numbers) if isinstance(self.body[n], _FRESH)]
        return numbers[max(fresh, default=0) :]


_IMPORTS = (ast.Import, ast.ImportFrom)
_FRESH = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *_IMPORTS)
#: What has variables of its own.
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _names(node: ast.AST) -> Iterator[str]:
    """The names of the top that a statement binds, or whose parts it sets."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((a.asname or a.name.partition(".")[0]) for a in node.names)
    elif isinstance(getattr(node, "ctx", None), ast.Store):
        yield from _root(node)
    elif isinstance(name := getattr(node, "name", None), str):  # of a function, class or match
        yield name
    if not isinstance(node, (*_FRESH, *_SCOPES)):
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _called(node: ast.AST) -> Iterator[str]:
    """The names that a statement may change by calls whose results nobody uses.

    They are ``a`` in ``a.b[c].append(1)`` and in ``zeros_(a.b)``, and in a loop over ``a`` whose
    body does so with its items.
    """
    if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
        if isinstance(call.func, ast.Attribute):
            yield from _root(call.func)
        if ast.unparse(call.func).endswith("_") and call.args:
            yield from _root(call.args[0])
    if isinstance(node, ast.For) and {*_names(node.target)} & {*_each(node.body, _called)}:
        yield from (n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name))
    if not isinstance(node, (*_FRESH, *_SCOPES)):
        yield from _each(ast.iter_child_nodes(node), _called)


def _set(node: ast.stmt) -> Iterator[str]:
    """The modules with a setting that a statement makes, as ``torch.manual_seed(0)``."""
    if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
        if isinstance(call.func, ast.Attribute) and _SETTING.search(call.func.attr):
            yield from _root(call.func)


#: Calls of modules that change what comes after them.
_SETTING = re.compile(r"seed|^set_|^use_")


def _each(nodes: Iterable[ast.AST], names: Callable[[ast.AST], Iterator[str]]) -> Iterator[str]:
    for node in nodes:
        yield from names(node)


def _is_main(node: ast.stmt) -> bool:
    """True for ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _root(node: ast.AST) -> Iterator[str]:
    """The ``a`` of ``a.b[c]`` and of ``a.b().c``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id


class _Writer:
    """Collects what is needed, each statement after those that it refers to."""

    def __init__(self, own: Module) -> None:
        self.modules = {"": own}
        self.imports: set[str] = set()
        self.parts: list[str] = []
        self.own: dict[int, str] = {}
        self.homes: dict[str, str] = {}

    def need(self, module: Module, name: str, at: int = 0) -> None:
        """Take in what a name of a module stands for at a statement, if that is not a builtin."""
        stand_in = STAND_INS.get((module.name, name))
        if stand_in is not None:
            self._stand_in(*stand_in)
        elif name in module.defined:
            for number in module.needed(name, at):
                self._take(module, number, name)
        elif not hasattr(builtins, name) and name not in _OF_MODULES:
            raise DistkitError(
                f"{module.path}: the function needs {name!r}, which nothing at the top defines. "
                "Define it there, or import it by its name, and export again."
            )

    def _take(self, module: Module, number: int, name: str) -> None:
        node = module.body[number]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(module, node, name)
            return
        if number in module.used:
            return
        module.used.add(number)
        if module.name.split(".")[1:2] and module.name.split(".")[1] in KEPT:
            raise self._refused(f"{module.name}.{name}")
        for one in {*_names(node)}:
            home = self.homes.setdefault(one, module.name)
            if home != module.name:
                raise DistkitError(
                    f"{one} is defined in {home or 'the source'} and in {module.name}: "
                    "give yours another name, and export again."
                )
        text = self._copied(module, node, number)
        if module.name:
            self.parts.append(text)
        else:
            self.own[number] = text

    def _copied(self, module: Module, node: ast.stmt, number: int) -> str:
        """A statement as a script has it; of a call that it cannot have, the line is told."""
        try:
            return self._written(module, node, number)
        except DistkitError as error:
            if not isinstance(node, ast.Expr):
                raise
            raise DistkitError(
                f"{module.path}, line {node.lineno}: {ast.unparse(node)} may change what the "
                f"function uses, and has to come along. {error}"
            ) from error

    def _import(self, module: Module, node: ast.Import | ast.ImportFrom, name: str) -> None:
        alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
        renamed = alias.asname not in (None, alias.name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distkit"):
            if renamed:
                raise self._hidden(module, node)
            self._of_distkit([*str(node.module).split("."), alias.name])
        elif alias.name.startswith("distkit"):
            raise self._hidden(module, node)
        else:
            one = (
                ast.ImportFrom(node.module, [alias], 0)
                if isinstance(node, ast.ImportFrom)
                else (ast.Import([alias]))
            )
            self.imports.add(ast.unparse(one))

    def _hidden(self, module: Module, node: ast.AST) -> DistkitError:
        return DistkitError(
            f"{module.path}, line {getattr(node, 'lineno', 0)}: a script has none of distkit's "
            "modules. Write 'import distkit as dk' at the top, use its functions as dk.name, and "
            "export again."
        )

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

    def _written(self, module: Module, node: ast.stmt, number: int) -> str:
        """A statement as it is in its file, but for ``dk.name``, which becomes ``name``."""
        code = compile(ast.Module([node], []), module.path, "exec", _ANNOTATIONS, dont_inherit=True)
        aliases = {n for n in global_names(code) if _is_distkit(module.statement(n), n)}
        changes = []
        for hidden in filter(_imports_distkit, ast.walk(node)):
            raise self._hidden(module, hidden)
        for chain in _chains(node, aliases):
            if (path := _dotted(chain)) is not None:
                changes.append((chain, self._of_distkit(["distkit", *path[1:]])))
        bare = {n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in aliases}
        for alone in bare - {_name_of(chain) for chain, _ in changes}:
            raise self._hidden(module, alone)
        for name in global_names(code):
            if name in module.defined or name not in _of_classes(code):
                if name not in aliases:
                    self.need(module, name, number)
        return _changed(module.source, node, changes)

    def text(self, name: str, source: str) -> str:
        """The whole script."""
        needed = {"ast", "os", "sys", "torch", "torch.distributed as dist"}
        imports = {*self.imports, *(f"import {module}" for module in needed)}
        listed = "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line)))
        body = "\n\n\n".join([*self.parts, *(self.own[n] for n in sorted(self.own))])
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
    if torch.cuda.is_available():  # tensors may be on the CPU all the same
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    try:
        result = {name}(**{{k: ast.literal_eval(v) for k, v in given.items()}})
        if result is not None:
            print(f"rank {{dist.get_rank()}}: {{result}}\\n", end="", flush=True)
    finally:
        dist.destroy_process_group()
"""


#: What every module has.
_OF_MODULES = {"__name__", "__file__", "__doc__", "__annotations__"}


def _of_classes(code: CodeType) -> set[str]:
    """The names that the bodies of classes in a code object define."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    return found.union(*(_of_classes(c) for c in code.co_consts if isinstance(c, CodeType)))


def _is_distkit(node: ast.stmt | None, name: str) -> bool:
    return isinstance(node, ast.Import) and any(
        (a.name, a.asname or "distkit") == ("distkit", name) for a in node.names
    )


def _imports_distkit(node: ast.AST) -> bool:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names.append(node.module)
    return any(name.partition(".")[0] == "distkit" for name in names)


def _name_of(node: ast.expr) -> ast.expr:
    """The ``a`` of ``a.b.c``."""
    return _name_of(node.value) if isinstance(node, ast.Attribute) else node


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
