"""A submission as text: a notebook or a Python file, of which nothing is run here.

Only its imports, definitions and constants are taken, and a rank runs them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError
from distkit_course.exercises import TASKS

#: The largest file that is read [bytes].
LARGEST = 1 << 26

#: The statements that are taken from a submission, at the top level of a cell.
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
#: A cell that hands a function over: ``dk.check.NAME(function)``.
_CHECKED = re.compile(r"\bcheck\.(\w+)\((\w+)\)")
#: The errors of text that is no notebook, or no Python.
_UNREADABLE = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError)


class Written:
    """A function as text: whoever calls it first runs the text, on a rank.

    Args:
        name: the function's name.
        text: of the definitions that it may need.
        parameters: how many arguments it takes; None if that is only known when it runs.
    """

    def __init__(self, name: str, text: str, parameters: int | None) -> None:
        self.__name__, self._text, self._space = name, text, dict[str, Any]()
        several, one = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY
        taken = [inspect.Parameter(f"x{i}", one) for i in range(parameters or 0)]
        any_number = [inspect.Parameter("xs", several)]
        self.__signature__ = inspect.Signature(any_number if parameters is None else taken)

    def __call__(self, *arguments: Any) -> Any:
        """Call it, where it is defined by now."""
        if not self._space:
            self._space["__name__"] = "submission"
            exec(compile(self._text, f"<{self.__name__}>", "exec"), self._space)
        return self._space[self.__name__](*arguments)


def read(submission: Path) -> dict[str, Written | str]:
    """The answers of a submission by exercise; of a cell that is no Python, why not.

    Raises:
        DistkitError: the file cannot be read.
    """
    try:
        cells = [*map(_cell, _texts(submission))]
    except (OSError, *_UNREADABLE) as error:
        why = str(error) or type(error).__name__
        raise DistkitError(f"{submission.name} cannot be read: {why}") from error
    found = _answers(cells)
    own = {id(cell) for cell, _ in found.values()}
    shared = [one for cell in cells if id(cell) not in own for one in cell.definitions]
    return {name: cell.answer(function, shared) for name, (cell, function) in found.items()}


def _texts(submission: Path) -> list[str]:
    """The code of a file, cell by cell."""
    if not submission.is_file():
        raise ValueError("it is not a file")
    if submission.stat().st_size > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    text = submission.read_text(encoding="utf-8-sig")
    if submission.suffix != ".ipynb":
        return [text]
    notebook = json.loads(text)
    if not isinstance(notebook, dict):
        raise ValueError("it is no notebook")
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


@dataclass
class _Cell:
    """A cell: its functions with the number of their arguments, and the text of its definitions."""

    text: str
    functions: dict[str, int | None]
    definitions: list[str] = field(default_factory=list)
    fault: str = ""

    def answer(self, function: str, shared: list[str]) -> Written | str:
        """A function with what it may need of other cells; of a cell that is no Python, why not."""
        if self.fault:
            return self.fault
        text = "\n".join([*shared, *self.definitions])
        return Written(function, text, self.functions[function])


def _cell(text: str) -> _Cell:
    try:
        tree = ast.parse("\n".join(map(_without_magic, text.split("\n"))))
        functions = {n.name: _parameters(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
        defined = [
            ast.unparse(_if_there(n) if _assigns(n) else n) for n in tree.body if _defines(n)
        ]
        return _Cell(text, functions, defined)
    except _UNREADABLE as error:
        found = re.findall(r"^def (\w+)\((\s*\))?", text, flags=re.M)
        functions = {name: 0 if none else None for name, none in found}
        return _Cell(text, functions, fault=f"it cannot be read: {error}")


def _without_magic(line: str) -> str:
    """A line, or nothing in the place of one that only IPython knows."""
    return "" if line.lstrip().startswith(("%", "!")) else line


def _defines(node: ast.stmt) -> bool:
    if _assigns(node):
        return not any(isinstance(n, ast.Call) for n in ast.walk(node))
    return isinstance(node, _DEFINITIONS)


def _assigns(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _if_there(node: ast.stmt) -> ast.stmt:
    """Leave out what only a run of the notebook has, such as ``first = run.results[0]``.

    An answer that needs it all the same gets a NameError with its name.
    """
    otherwise = ast.ExceptHandler(ast.Name("Exception"), None, [ast.Pass()])
    return ast.Try([node], [otherwise], [], [])


def _parameters(node: ast.FunctionDef) -> int | None:
    """How many arguments a function takes; None if it may take several numbers of them."""
    given = node.args
    plain = not (given.vararg or given.kwonlyargs or given.defaults or node.decorator_list)
    return len(given.posonlyargs) + len(given.args) if plain else None


def _answers(cells: list[_Cell]) -> dict[str, tuple[_Cell, str]]:
    """Of each exercise the cell with its answer, and the name that the function has there.

    An answer is handed to its check, or has its exercise's name and takes arguments, as all
    exercises do. What a lesson defines by such a name, to show something, takes none.
    """
    found, homes = dict[str, tuple[_Cell, str]](), dict[str, _Cell]()
    for cell in cells:
        homes |= dict.fromkeys(cell.functions, cell)
        named = {name for name, takes in cell.functions.items() if takes != 0 and name in TASKS}
        found |= {name: (cell, name) for name in cell.functions if name in named}
        handed = [(name, f) for name, f in _CHECKED.findall(cell.text) if name in TASKS]
        found |= {name: (homes[f], f) for name, f in handed if f in homes}
    return found
