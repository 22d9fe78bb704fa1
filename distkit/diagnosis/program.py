"""Reading the program's text: the loop and the condition around a line. Pure.

The calls alone do not tell a rank that left its loop early from one that came to a call which
others never make; the text does. Lines are ``file:number`` as in events; where a text is not known,
or is no plain Python, nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: Where a line stands: statements around it from the outside, and in which part of each.
Chain = list[tuple[ast.AST, str]]

_LOOPS = ast.For, ast.While, ast.AsyncFor
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
_LONGEST = 60  # characters of a condition that are shown
_TRIES = 5
_DEEPEST = 4  # calls that are followed to where a function is called


@dataclass(frozen=True)
class Place:
    """A statement: its words, and where it begins."""

    words: str
    where: str

    @property
    def loops(self) -> bool:
        """True if it is a loop."""
        return self.words.startswith(("for ", "while "))

    def __str__(self) -> str:
        return f"`{self.words}` at {self.where}"


class Program:
    r"""The texts of a run's program.

    Args:
        sources: by the file's name.

    >>> text = "for x in data:\n    if bad(x):\n        continue\n    reduce(x)\nbarrier()\n"
    >>> program = Program({"a.py": text})
    >>> print(program.parting("a.py:4", "a.py:5"))
    `for x in data` at a.py:1
    >>> [str(loop) for loop in program.loops("a.py:4")]
    ['`for x in data` at a.py:1']
    >>> [str(exit) for exit in program.exits("a.py:4")]
    ['`continue` under `if bad(x)` at a.py:3']
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def text(self, where: str) -> str:
        """The line itself; "" if it is not known."""
        file, number = _split(where)
        lines = self._sources.get(file, "").splitlines()
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def parting(self, here: str, there: str) -> Place | None:
        """The outermost loop or condition around a line that is not around another one."""
        chain, other = self._chain(here), self._chain(there)
        for node, part in chain:
            if (node, part) not in other and isinstance(node, (*_LOOPS, ast.If, ast.ExceptHandler)):
                return _place(_split(here)[0], node, part)
        return None

    def alternatives(self, here: str, there: str) -> bool:
        """True if two lines are branches of one condition: who goes through one skips the other."""
        other = dict(self._chain(there))
        return any(
            isinstance(node, ast.If) and other.get(node, part) != part
            for node, part in self._chain(here)
        )

    def follows(self, here: str, there: str) -> bool:
        """True if a line comes after another one of the file, and no loop leads back to that."""
        (file, number), (other, first) = _split(here), _split(there)
        both = {id(node) for node, _ in self._chain(here)} & {id(n) for n, _ in self._chain(there)}
        nodes = (node for node, _ in self._chain(there) if id(node) in both)
        return file == other and first < number and not any(isinstance(n, _LOOPS) for n in nodes)

    def condition(self, where: str) -> Place | None:
        """The outermost condition around a line, in its function or where that is called."""
        for node, part in self._chain(where):
            if isinstance(node, (ast.If, ast.ExceptHandler)):
                return _place(_split(where)[0], node, part)
        return None

    def loops(self, where: str) -> list[Place]:
        """The loops around a line, the innermost first."""
        around = reversed(self._chain(where))
        return [_place(_split(where)[0], node) for node, _ in around if isinstance(node, _LOOPS)]

    def exits(self, where: str) -> list[Place]:
        """Statements that may keep a rank from reaching a line as often as others do.

        That is every ``break``, ``continue``, ``return``, silent ``except`` and ``no_sync()`` of
        the loops around it, and every ``return`` before it.
        """
        file, number = _split(where)
        chain = self._chain(where)
        loop = next((node for node, part in chain if isinstance(node, _LOOPS)), None)
        function = next((n for n, _ in reversed(chain) if isinstance(n, _FUNCTIONS)), None)
        found = list(_exits(file, loop, None)) if loop is not None else []
        before = list(_exits(file, function, None)) if function is not None else []
        found += [
            p
            for p in before
            if p not in found and "return" in p.words.split()[0] and _split(p.where)[1] < number
        ]
        return found

    # -- finding a line ---------------------------------------------------------

    def _chain(self, where: str, depth: int = 0) -> Chain:
        file, number = _split(where)
        tree = self._tree(file)
        if tree is None:
            return []
        chain = _inwards(tree, number)
        function = next((n for n, _ in reversed(chain) if isinstance(n, _FUNCTIONS)), None)
        if isinstance(function, ast.ClassDef) or function is None or depth == _DEEPEST:
            return chain
        calls = [
            n.lineno
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and _name(n.func) == function.name
        ]
        if len(set(calls)) == 1 and not function.lineno <= calls[0] <= (function.end_lineno or 0):
            return [*self._chain(f"{file}:{calls[0]}", depth + 1), *chain]
        return chain

    def _tree(self, file: str) -> ast.Module | None:
        return _parsed(self._sources.get(file, ""))


@lru_cache(maxsize=64)  # a run that hangs is looked at again and again
def _parsed(text: str) -> ast.Module | None:
    """The tree of a text; None if it is no plain Python: a cell with magics."""
    for _ in range(_TRIES):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        except SystemError:  # another thread was parsing: CPython before 3.11.8, gh-106905
            continue
    return None


def _split(where: str) -> tuple[str, int]:
    file, _, number = where.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def _inwards(node: ast.AST, number: int) -> Chain:
    """The statements around a line number, and the fields in which it stands."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else ():
            first = getattr(child, "lineno", None)
            if first is not None and first <= number <= (child.end_lineno or first):
                inner = _inwards(child, number)
                return [(node, field), *inner] if not isinstance(node, ast.Module) else inner
    return [(node, "")] if isinstance(node, ast.stmt) else []


def _name(function: ast.AST) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# -- telling it -----------------------------------------------------------------------


def _place(file: str, node: ast.AST, part: str = "body") -> Place:
    return Place(_words(node, part), f"{file}:{getattr(node, 'lineno', 0)}")


def _words(node: ast.AST, part: str = "body") -> str:
    if isinstance(node, ast.If):
        words = f"if {ast.unparse(node.test)}"
        words = words if part != "orelse" else f"else of {words}"
    elif isinstance(node, ast.While):
        words = f"while {ast.unparse(node.test)}"
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        words = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    elif isinstance(node, ast.ExceptHandler):
        words = f"except {ast.unparse(node.type)}" if node.type is not None else "except"
    elif isinstance(node, ast.With):
        words = f"with {ast.unparse(node.items[0].context_expr)}"
    else:
        words = type(node).__name__.lower()
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"


def _exits(file: str, node: ast.AST, under: ast.AST | None, inner: bool = False) -> Iterator[Place]:
    """The ways out of a loop's pass, or out of a function; ``inner``: in a loop inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.Lambda)):
            continue
        leaves = isinstance(child, ast.Return) or (
            isinstance(child, (ast.Break, ast.Continue)) and not inner
        )
        if leaves and under is not None:
            place = _place(file, child)
            yield Place(f"{place.words}` under `{_words(under)}", place.where)
        elif isinstance(child, ast.With) and "no_sync" in _words(child):
            yield _place(file, child)
        elif isinstance(child, ast.ExceptHandler) and not _leads_out(child.body):
            yield _place(file, child)
        else:
            conditional = isinstance(child, (ast.If, ast.ExceptHandler))
            yield from _exits(
                file, child, child if conditional else under, inner or isinstance(child, _LOOPS)
            )


def _leads_out(body: Sequence[ast.stmt]) -> bool:
    """True if a block ends with a statement that leaves it: that one is told instead."""
    return isinstance(body[-1], (ast.Raise, ast.Return, ast.Break, ast.Continue))
