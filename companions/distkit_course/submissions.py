"""Reads submissions (notebooks or Python files) without executing them.

Only imports, definitions and constants are used, and only ranks execute them.
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

#: Maximum size of a submission [bytes].
MAX_SIZE = 1 << 26

#: The top-level statements of a submission that are used, besides assignments without calls.
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
#: A call that submits a function: ``dk.check.NAME(function)``.
_CHECKED = re.compile(r"\bcheck\.(\w+)\((\w+)\)")
#: Errors raised for invalid notebooks or invalid Python.
_UNREADABLE = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError)


class SubmittedFunction:
    """A function stored as source code, which is executed on its first call, on a rank.

    Args:
        name: the function's name.
        text: the source of the function and of the definitions that it may use.
        parameters: the number of parameters; None if it is unknown before the function runs.
    """

    def __init__(self, name: str, text: str, parameters: int | None) -> None:
        self.__name__, self._text, self._namespace = name, text, dict[str, Any]()
        variadic_kind, positional_kind = (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.POSITIONAL_ONLY,
        )
        fixed = [inspect.Parameter(f"x{i}", positional_kind) for i in range(parameters or 0)]
        variadic = [inspect.Parameter("xs", variadic_kind)]
        self.__signature__ = inspect.Signature(variadic if parameters is None else fixed)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, after defining it if necessary."""
        if not self._namespace:
            self._namespace["__name__"] = "submission"
            exec(compile(self._text, f"<{self.__name__}>", "exec"), self._namespace)
        return self._namespace[self.__name__](*arguments)


def read(submission: Path) -> dict[str, SubmittedFunction | str]:
    """Return a submission's answers by exercise; for invalid Python, an error message.

    Raises:
        DistkitError: the file cannot be read.
    """
    try:
        cells = [*map(_cell, _texts(submission))]
    except (OSError, *_UNREADABLE) as error:
        reason = str(error) or type(error).__name__
        raise DistkitError(f"{submission.name} cannot be read: {reason}") from error
    answers = _answers(cells)
    answer_cells = {id(cell) for cell, _ in answers.values()}
    shared = [
        definition
        for cell in cells
        if id(cell) not in answer_cells
        for definition in cell.definitions
    ]
    return {name: cell.answer(function, shared) for name, (cell, function) in answers.items()}


def _texts(submission: Path) -> list[str]:
    """Return the code of each cell in a file."""
    if not submission.is_file():
        raise ValueError("it is not a file")
    if submission.stat().st_size > MAX_SIZE:
        raise ValueError(f"it is larger than {MAX_SIZE >> 20} MiB")
    text = submission.read_text(encoding="utf-8-sig")
    if submission.suffix != ".ipynb":
        return [text]
    notebook = json.loads(text)
    if not isinstance(notebook, dict):
        raise ValueError("it is not a notebook")
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


@dataclass
class _Cell:
    """A cell, with the parameter counts of its functions and the source of its definitions."""

    text: str
    functions: dict[str, int | None]
    definitions: list[str] = field(default_factory=list)
    error: str = ""

    def answer(self, function: str, shared: list[str]) -> SubmittedFunction | str:
        """Return a function with the shared definitions, or the cell's error."""
        if self.error:
            return self.error
        text = "\n".join([*shared, *self.definitions])
        return SubmittedFunction(function, text, self.functions[function])


def _cell(text: str) -> _Cell:
    try:
        tree = ast.parse("\n".join(map(_without_magic, text.split("\n"))))
        functions = {n.name: _parameters(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
        definitions = [
            ast.unparse(_if_defined(n) if _assigns(n) else n) for n in tree.body if _defines(n)
        ]
        return _Cell(text, functions, definitions)
    except _UNREADABLE as exception:
        headers = re.findall(r"^def (\w+)\((\s*\))?", text, flags=re.M)
        functions = {name: 0 if empty else None for name, empty in headers}
        return _Cell(text, functions, error=f"it cannot be read: {exception}")


def _without_magic(line: str) -> str:
    """Return the line, or "" for an IPython magic."""
    return "" if line.lstrip().startswith(("%", "!")) else line


def _defines(node: ast.stmt) -> bool:
    if _assigns(node):
        return not any(isinstance(n, ast.Call) for n in ast.walk(node))
    return isinstance(node, _DEFINITIONS)


def _assigns(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _if_defined(node: ast.stmt) -> ast.stmt:
    """Ignore errors in a statement that may need the notebook's state: ``first = run.results[0]``.

    An answer that uses the missing name raises a NameError.
    """
    handler = ast.ExceptHandler(ast.Name("Exception"), None, [ast.Pass()])
    return ast.Try([node], [handler], [], [])


def _parameters(node: ast.FunctionDef) -> int | None:
    """Return the number of a function's parameters; None if it varies."""
    arguments = node.args
    is_fixed = not (
        arguments.vararg or arguments.kwonlyargs or arguments.defaults or node.decorator_list
    )
    return len(arguments.posonlyargs) + len(arguments.args) if is_fixed else None


def _answers(cells: list[_Cell]) -> dict[str, tuple[_Cell, str]]:
    """Return, for each exercise, the cell with its answer and the function's name.

    An answer is passed to its check, or has its exercise's name and takes arguments. A function
    with an exercise's name that takes no arguments is an example from a lesson.
    """
    answers, function_cells = dict[str, tuple[_Cell, str]](), dict[str, _Cell]()
    for cell in cells:
        function_cells |= dict.fromkeys(cell.functions, cell)
        exercises = {name for name, n in cell.functions.items() if n != 0 and name in TASKS}
        answers |= {name: (cell, name) for name in cell.functions if name in exercises}
        checked = [(name, f) for name, f in _CHECKED.findall(cell.text) if name in TASKS]
        answers |= {name: (function_cells[f], f) for name, f in checked if f in function_cells}
    return answers
