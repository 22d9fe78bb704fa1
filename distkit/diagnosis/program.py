"""Finds the loops, conditions and exits in a program that lead to a line or skip it.

No side effects.

The recorded calls do not distinguish a rank that exited its loop early from a rank that made an
extra call, but the source code does. A *path* is the stack of a call: its line and its callers'
lines, innermost first, each written ``file:number`` as in events. Unknown files and files that are
not Python are ignored.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: A line and its callers' lines, innermost first.
Path = Sequence[str]

#: The statements and expressions that enclose a line, outermost first, each with its branch.
Chain = list[tuple[ast.AST, str]]

#: Matches names, and parts of names, that identify the rank.
_RANK = re.compile(
    r"(?<![A-Za-z0-9_])(me|my_?id)(?![A-Za-z0-9_])|rank(?!s\b)"
    r"|is_?(main|master|chief|leader|root)|main_process|master|process_(index|id)",
    re.IGNORECASE,
)

_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
_LOOPS = ast.For, ast.While, ast.AsyncFor
_STATEMENT_TYPES = ast.stmt, ast.ExceptHandler, ast.match_case
_MAX_CHARS = 60  # maximum length of a condition in a message
_MAX_DEPTH = 4  # maximum depth of callers


@dataclass(frozen=True)
class Statement:
    """A statement's text, and the line where it begins."""

    text: str
    where: str

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop."""
        return self.text.startswith(("for ", "while "))

    def __str__(self) -> str:
        return f"`{self.text}` at {self.where}"


@dataclass(frozen=True)
class Guard:
    """A statement that may prevent a rank from reaching a line.

    Args:
        statement: its text and line.
        node: its syntax tree.
        branch: the branch that leads to the line; "exit" for a statement that skips it.
        by_rank: whether its condition depends on the rank, judging by the names in it.
        scope: for an exit, the function or loop that it ends.
    """

    statement: Statement
    node: ast.AST
    branch: str
    by_rank: bool
    scope: ast.AST | None = None

    @property
    def is_exit(self) -> bool:
        """Whether it is an exit: ``return``, ``raise``, ``break`` or ``continue``."""
        return self.branch == "exit"


@dataclass(frozen=True)
class _Frame:
    """A function of a path, or the module, with its file, line and enclosing statements."""

    file: str
    number: int
    chain: Chain
    function: ast.AST


class Program:
    r"""The source code of a run's program.

    Args:
        sources: the source code of each file.

    >>> text = "for x in data:\n    if bad(x):\n        continue\n    reduce(x)\nbarrier()\n"
    >>> program = Program({"a.py": text})
    >>> [str(guard.statement) for guard in program.differing_guards(["a.py:4"], ["a.py:5"])]
    ['`continue` under `if bad(x)` at a.py:3', '`for x in data` at a.py:1']
    >>> [str(loop) for loop in program.loops(["a.py:4"])]
    ['`for x in data` at a.py:1']
    >>> [str(exit) for exit in program.exits(["a.py:4"])]
    ['`continue` under `if bad(x)` at a.py:3']
    >>> sorted(program.calls_below(["a.py:2"]))
    ['barrier', 'reduce']
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def text(self, where: str) -> str:
        """Return the text of a line; "" if unknown."""
        file, number = _split(where)
        lines = self._sources.get(file, "").splitlines()
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def tree(self, where: str) -> ast.Module | None:
        """Return the syntax tree of a line's file; None if it is unknown or not Python."""
        file, number = _split(where)
        return _parsed(self._sources[file]) if number and self._sources.get(file) else None

    # -- conditions and exits -------------------------------------------------------

    def skipping_guard(self, path: Path) -> Guard | None:
        """Return the innermost condition that may make some ranks skip a line; None if none does.

        Conditions on the rank take precedence.
        """
        guards = self._guards(path)
        candidates = [g for g in guards if not g.statement.is_loop or g.by_rank]
        preferences = (
            [g for g in candidates if g.by_rank],
            [g for g in candidates if not g.is_exit],
        )
        return next((found[-1] for found in preferences if found), None)

    def differing_guards(self, here: Path, there: Path) -> list[Guard]:
        """Return the loops, conditions and exits that apply to one line but not to another."""
        branches, functions = self._branches(there), {id(f.function) for f in self._frames(there)}
        return [
            g
            for g in self._guards(here)
            if (id(g.node), g.branch) not in branches
            and not (g.is_exit and id(g.scope) in functions | {n for n, _ in branches})
        ]

    def follows(self, here: str, there: Path) -> bool:
        """Return whether a line follows another in the same file, and no loop contains both."""
        (file, number), (other, first) = _split(here), _split(there[0])
        enclosing = {id(n) for f in self._frames([here]) for n, _ in f.chain}
        nodes = [n for f in self._frames(there) for n, _ in f.chain if id(n) in enclosing]
        return file == other and first < number and not any(isinstance(n, _LOOPS) for n in nodes)

    def skips(self, here: str, there: str) -> bool:
        r"""Return whether a line of a function can run before another line, or instead of it.

        >>> program = Program({"a.py": "if me:\n    reduce(x)\nelse:\n    end()\nend()\n"})
        >>> program.skips("a.py:4", "a.py:2"), program.skips("a.py:5", "a.py:2")
        (True, False)
        """
        (file, number), (other, last) = _split(here), _split(there)
        functions = [[f.function for f in self._frames([line])][-1:] for line in (here, there)]
        if file != other or functions[0] != functions[1]:
            return False
        replaces = self.are_alternatives(here, there)
        return replaces or number < last or not self.follows(here, [there])

    def loops(self, path: Path) -> list[Statement]:
        """Return the loops that enclose a line, innermost first."""
        return [
            _statement_of(frame.file, node)
            for frame in reversed(self._frames(path))
            for node, branch in reversed(frame.chain)
            if isinstance(node, _LOOPS) and branch == "body"
        ]

    def exits(self, path: Path) -> list[Statement]:
        """Return statements that may make a rank reach a line less often than others.

        In each function, they are the conditional ``break`` and ``continue`` statements of the
        outermost enclosing loop, the conditional ``return`` statements, ``except`` blocks and
        ``no_sync()`` blocks in that loop, and the conditional ``return`` statements before the
        line.
        """
        found: dict[Statement, None] = {}
        for frame in self._frames(path):
            loop = next((n for n, p in frame.chain if isinstance(n, _LOOPS) and p == "body"), None)
            statements = [*_exits(frame.file, loop)] if loop is not None else []
            statements += [
                statement
                for statement in _exits(frame.file, frame.function)
                if statement.text.startswith("return") and _split(statement.where)[1] < frame.number
            ]
            found.update(dict.fromkeys(statements))
        return [*found]

    def calls_below(self, path: Path) -> set[str]:
        """Return the names of functions called below a line, in its function and its callers."""
        return {
            _name_of(call.func)
            for frame in self._frames(path)
            for call in ast.walk(frame.function)
            if isinstance(call, ast.Call) and call.lineno > frame.number
        }

    def are_alternatives(self, here: str, there: str) -> bool:
        """Return whether two lines are in different branches of one condition."""
        branches = dict(self._branches([there]))
        return any(branches.get(n, branch) != branch for n, branch in self._branches([here]))

    # -- syntax trees ----------------------------------------------------------

    def _guards(self, path: Path) -> list[Guard]:
        """Return all guards of a line, outermost first; in each frame, exits precede conditions."""
        frames = self._frames(path)
        guards = []
        for frame in frames:
            guards += [*_exits_before(frame), *_conditions(frame)]
        return guards

    def _branches(self, path: Path) -> set[tuple[int, str]]:
        """Return the branches that contain a line."""
        return {(id(node), branch) for f in self._frames(path) for node, branch in f.chain}

    def _frames(self, path: Path) -> list[_Frame]:
        """Return the functions of a path, outermost first."""
        lines = [*path]
        if len(lines) == 1:
            lines += self._callers(lines[0])
        frames: list[_Frame] = []
        inner = ""  # the function that the frame calls
        for where in lines:
            file, number = _split(where)
            tree = self.tree(where)
            if tree is None:
                continue
            function = _function_at(tree, number)
            chain = _enclosing(function, number)
            if chain:
                chain += _conditions_in(chain[-1][0], number, inner)
            frames.append(_Frame(file, number, chain, function))
            inner = getattr(function, "name", "")
        return frames[::-1]

    def _callers(self, where: str, depth: int = 0) -> list[str]:
        """Return the lines of the callers, as long as each function is called on only one line."""
        file, number = _split(where)
        tree = self.tree(where)
        function = _function_at(tree, number) if tree is not None else None
        if tree is None or not isinstance(function, _FUNCTIONS) or depth == _MAX_DEPTH:
            return []
        calls = {
            n.lineno
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and _name_of(n.func) == function.name
        }
        own_lines = range(function.lineno, (function.end_lineno or 0) + 1)
        if len(calls) != 1 or not calls.isdisjoint(own_lines):
            return []
        caller = f"{file}:{calls.pop()}"
        return [caller, *self._callers(caller, depth + 1)]


@lru_cache(maxsize=64)  # a hanging run is diagnosed repeatedly
def _parsed(text: str) -> ast.Module | None:
    """Return the tree of a text, ignoring a cell's magics; None if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        plain = re.sub(r"^( *)[%!].*", r"\1pass", text, flags=re.M)
        return None if plain == text else _parsed(plain)


def _name_of(function: ast.AST) -> str:
    """Return the last part of a function's name: ``all_reduce`` for ``dist.all_reduce``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _mentions_rank(value: ast.AST) -> bool:
    """Return whether a name in an expression identifies the rank."""
    return _RANK.search(ast.unparse(value)) is not None


def _split(where: str) -> tuple[str, int]:
    file, _, number = where.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def _extent(node: ast.AST) -> range:
    """Return the lines of a statement, an ``except`` or a ``case``."""
    first = node.pattern.lineno if isinstance(node, ast.match_case) else getattr(node, "lineno", 0)
    last = node.body[-1] if isinstance(node, ast.match_case) else node
    return range(first, (getattr(last, "end_lineno", 0) or first) + 1)


def _function_at(tree: ast.Module, number: int) -> ast.AST:
    """Return the innermost function that encloses a line, or the module."""
    enclosing = [
        n
        for n in ast.walk(tree)
        if isinstance(n, _FUNCTIONS) and number in _extent(n) and number >= n.body[0].lineno
    ]
    return max(enclosing, key=lambda n: n.lineno, default=tree)


def _enclosing(node: ast.AST, number: int) -> Chain:
    """Return the statements that enclose a line of a function or module, and their branches."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else ()):
            if isinstance(child, _STATEMENT_TYPES) and number in _extent(child):
                branch = f"{field} {index}" if isinstance(node, ast.Match) else field
                return [(node, branch), *_enclosing(child, number)]
    return [(node, "")]


def _conditions_in(statement: ast.AST, number: int, inner: str) -> Chain:
    """Return the conditional expressions that enclose a call on one line of a statement.

    Args:
        statement: the innermost statement.
        number: the line number.
        inner: the called function; "" for any function that communicates.
    """
    calls = [
        chain
        for chain in _expressions(statement, [])
        if (call := chain[-1][0]) and number in _extent(call) and _is_call(call, inner)
    ]
    return [(n, p) for n, p in calls[0] if isinstance(n, (ast.IfExp, ast.BoolOp))] if calls else []


def _expressions(node: ast.AST, enclosing: Chain) -> Iterator[Chain]:
    """Yield the calls in an expression, each with its enclosing expressions."""
    if isinstance(node, ast.Call):
        yield [*enclosing, (node, "")]
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, _STATEMENT_TYPES):
                branch = str(index) if isinstance(node, ast.BoolOp) else field
                yield from _expressions(child, [*enclosing, (node, branch)])


#: Matches the names of functions that communicate.
_COMMUNICATES = re.compile(
    r"^i?(send|recv)|broadcast|reduce|gather|scatter|all_to_all|barrier|new_group|irecv|backward"
)


def _is_call(node: ast.AST, inner: str) -> bool:
    name = _name_of(node.func) if isinstance(node, ast.Call) else ""
    return name == inner if inner else bool(_COMMUNICATES.search(name))


# -- conditions and exits -----------------------------------------------------------------


def _conditions(frame: _Frame) -> Iterator[Guard]:
    """Yield the loops and conditions that enclose a frame's line."""
    for (node, branch), (child, _) in zip(frame.chain, [*frame.chain[1:], (None, "")], strict=True):
        text, test = _describe(node, branch, child)
        if test is None or isinstance(test, ast.Constant) or "__name__" in ast.unparse(test):
            continue  # the outcome is the same on every rank
        yield Guard(
            Statement(_shorten(text), f"{frame.file}:{_line(node, child)}"),
            node,
            branch,
            _mentions_rank(test),
        )


def _line(node: ast.AST, child: ast.AST | None) -> int:
    if isinstance(child, (ast.ExceptHandler, ast.match_case)):
        return _extent(child).start
    return int(getattr(node, "lineno", 0))


#: A statement, its enclosing conditions, and its enclosing loop, if any.
_Context = tuple[ast.AST, tuple[ast.AST, ...], "ast.AST | None"]


def _statements(
    node: ast.AST,
    branches: Mapping[int, str],
    tests: tuple[ast.AST, ...] = (),
    loop: ast.AST | None = None,
) -> Iterator[_Context]:
    """Yield the statements of a function or loop, without branches that ``branches`` excludes."""
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.If) and branches.get(id(node), field) != field:
            continue
        for child in value if isinstance(value, list) else ():
            if isinstance(child, _STATEMENT_TYPES) and not isinstance(child, _FUNCTIONS):
                yield child, tests, loop
                conditional = isinstance(child, _TESTS) and id(child) not in branches
                inner_loop = child if isinstance(child, _LOOPS) else loop
                inner_tests = (*tests, child) if conditional else tests
                yield from _statements(child, branches, inner_tests, inner_loop)


_TESTS = ast.If, ast.Match, ast.ExceptHandler


def _exits_before(frame: _Frame) -> Iterator[Guard]:
    """Yield the conditional exits before a frame's line, from its function or its loops."""
    branches = {id(node): branch for node, branch in frame.chain}
    for child, tests, loop in _statements(frame.function, branches):
        if not tests or _extent(child).start >= frame.number:
            continue
        if isinstance(child, (ast.Return, ast.Raise)):
            yield _exit_guard(frame, child, tests, frame.function)
        elif isinstance(child, (ast.Break, ast.Continue)) and id(loop) in branches:
            yield _exit_guard(frame, child, tests, loop)


def _exit_guard(
    frame: _Frame, child: ast.AST, tests: Sequence[ast.AST], scope: ast.AST | None
) -> Guard:
    """Return the guard for a conditional exit from a function or loop."""
    conditions = [getattr(t, "test", None) or getattr(t, "subject", None) for t in tests]
    by_rank = any(t is not None and _mentions_rank(t) for t in conditions)
    return Guard(_exit_statement(frame.file, child, tests), child, "exit", by_rank, scope=scope)


def _exit_statement(file: str, child: ast.AST, tests: Sequence[ast.AST]) -> Statement:
    statement = _statement_of(file, child)
    return Statement(f"{statement.text}` under `{_text_of(tests[-1])}", statement.where)


def _exits(file: str, node: ast.AST) -> Iterator[Statement]:
    """Yield the conditional exits from one iteration of a loop or from a function.

    Also yield the ``except`` and ``no_sync()`` blocks in it.
    """
    for child, tests, loop in _statements(node, {}):
        if isinstance(child, ast.Return) or (
            isinstance(child, (ast.Break, ast.Continue)) and loop is None
        ):
            if tests:
                yield _exit_statement(file, child, tests)
        elif isinstance(child, ast.ExceptHandler) or (
            isinstance(child, ast.With) and "no_sync" in _text_of(child)
        ):
            yield _statement_of(file, child)


# -- text of statements ---------------------------------------------------------------


def _statement_of(file: str, node: ast.AST) -> Statement:
    return Statement(_text_of(node), f"{file}:{getattr(node, 'lineno', 0)}")


def _text_of(node: ast.AST) -> str:
    return _shorten(_describe(node, "body")[0])


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…"


def _describe(
    node: ast.AST, branch: str, child: ast.AST | None = None
) -> tuple[str, ast.AST | None]:
    """Return a statement as text, and the expression that selects its branch."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            condition = test if branch in ("body", "orelse") else None
            return f"{'else of ' * (branch == 'orelse')}if {ast.unparse(test)}", condition
        case ast.While(test=test):
            return f"while {ast.unparse(test)}", test if branch == "body" else None
        case ast.For(target=target, iter=items) | ast.AsyncFor(target=target, iter=items):
            text = f"for {ast.unparse(target)} in {ast.unparse(items)}"
            return text, items if branch == "body" else None
        case ast.Match(subject=subject) if isinstance(child, ast.match_case):
            text = f"case {ast.unparse(child.pattern)}` of `match {ast.unparse(subject)}"
            return text, subject
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.And) else " or "
            before = values[: int(branch)]
            text = word.join([*map(ast.unparse, before), "…"])
            return text, ast.BoolOp(op, before) if before else None
        case ast.Try() if isinstance(child, ast.ExceptHandler):
            return _describe(child, "")[0], child.type or ast.Name("Exception")
        case ast.ExceptHandler(type=kind):
            return f"except {ast.unparse(kind)}" if kind is not None else "except", None
        case ast.With(items=[ast.withitem(context_expr=manager), *_]):
            text = f"with {ast.unparse(manager)}"
            return text, manager if branch == "body" and "suppress" in text else None
    return type(node).__name__.lower(), None
