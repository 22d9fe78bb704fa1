"""Labels source lines with their notebook cells, reads source text, and warns at user lines."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from distkit.errors import PACKAGE_PATHS, CommunicationWarning, wrapped
from distkit.recording.recorder import is_user_file

#: Warning that the processes of ``%%ranks`` cells have exited.
LOST_VARIABLES = (
    "the variables of %%ranks cells are lost: their processes have exited. The next cell starts "
    "new engines."
)

_files: dict[str, str] = {}  # label of a file -> its path
_labels: dict[str, str] = {}  # file of a cell that runs on the ranks -> its label
_cells = itertools.count()
_MAX_SOURCE = 200_000  # maximum number of characters of a source file in a trace


def shell() -> Any:
    """Return the IPython shell of this process; None outside IPython. Never imports IPython."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, whose front end can show images."""
    current = shell()
    return current is not None and hasattr(current, "kernel")


def running_cell_id() -> str | None:
    """Return the id of the running notebook cell, or None if it is unknown."""
    if not in_notebook():
        return None
    parent = shell().kernel.get_parent("shell") or {}
    cell_id: str | None = parent.get("metadata", {}).get("cellId")
    return cell_id


class CellRegistry:
    """A registry of the objects that notebook cells have created.

    When a cell is executed again and adds an object, the objects from its earlier executions are
    ended.

    Args:
        end: called to end an object.
    """

    def __init__(self, end: Callable[[Any], None]) -> None:
        self._end = end
        #: Each object's cell, and the id of the cell's execution.
        self._origins = weakref.WeakKeyDictionary[Any, tuple[str, str]]()

    def add(self, cell: str | None, value: Any) -> None:
        """Register an object that ``cell`` has created; a cell may create several."""
        if cell is None:
            return
        header = (shell().kernel.get_parent("shell") or {}).get("header", {})
        origin = cell, str(header.get("msg_id", ""))
        for other, (other_cell, execution) in list(self._origins.items()):
            if other_cell == cell and execution != origin[1]:
                self._end(other)
        self._origins[value] = origin


def name_running_cell(source: str) -> str:
    """Return a new file name, labeled ``In[n]`` in tracebacks, for code in the running cell."""
    history = getattr(shell(), "history_manager", None)
    # the first input is empty; execution_count differs between IPython 8 and 9
    count = 0 if history is None else len(history.input_hist_raw) - 1
    file, label = f"distkit-cell-{next(_cells)}", f"In[{count}]"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    _labels[file], _files[label] = label, file
    return file


@dataclass(frozen=True)
class Cell:
    """The source code of a ``%%ranks`` cell, and the ranks that run it."""

    source: str
    file: str
    ranks: list[int]
    __name__ = "cell"

    def __call__(self, namespace: dict[str, Any]) -> Any:
        """Run the cell. If it ends with an expression, return its value; print it unless None."""
        tree = ast.parse(self.source, self.file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, self.file, "exec"), namespace)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), self.file, "eval"), namespace)
        if value is not None:
            print(repr(value))
        return value


def line_label(where: str) -> str:
    """Return the label of ``file:line``: ``In[5]:3`` for a cell, a short path for a file."""
    return _line_label(where, getattr(shell(), "execution_count", 0))


@lru_cache(4096)
def _line_label(where: str, count: int) -> str:
    """Return the label. A cell's number may change, so the cache's key includes ``count``."""
    file, _, line = where.rpartition(":")
    if not file:
        return where
    compiler = getattr(shell(), "compile", None)
    code_name = getattr(compiler, "format_code_name", lambda name: None)(file)
    path, cwd = Path(file), Path.cwd()
    short_path = str(path.relative_to(cwd)) if path.is_relative_to(cwd) else path.name
    label = _labels.get(file) or (str(code_name[1]) if code_name else short_path)
    _files[label] = file
    return f"{label}:{line}"


def sources(lines: Iterable[str]) -> dict[str, str]:
    """Return the text of the source files that contain the lines, by label."""
    labels = {line.rpartition(":")[0] for line in lines if line}
    return {label: text for label in sorted(labels) if (text := _text(label))}


def _text(label: str) -> str:
    file = _files.get(label, label)
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))[:_MAX_SOURCE]


def warn(notices: Sequence[object], category: type[Warning] = CommunicationWarning) -> None:
    """Issue warnings that point to the user's line, not to a line in distkit or IPython."""
    frame = sys._getframe()
    while frame.f_back is not None and (
        (file := frame.f_code.co_filename).startswith(PACKAGE_PATHS) or not is_user_file(file)
    ):
        frame = frame.f_back
    file, _, line = line_label(f"{frame.f_code.co_filename}:{frame.f_lineno}").rpartition(":")
    head = f"{file}:{line}: {category.__name__}: "  # Python prints it before the message
    for notice in notices:
        warning = category(
            wrapped(f"{head}{notice}")[len(head) :] if in_notebook() else str(notice)
        )
        vars(warning)["notice"] = notice  # a notebook shows it as a card
        warnings.warn_explicit(warning, category, file, int(line))
