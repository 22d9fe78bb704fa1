"""Knowledge of the notebook that ranks lack: which file is which cell, and the sources."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from distkit.events import LINES, STACK, Event

_files: dict[str, str] = {}  # the reader's name of a file -> its path
_labels: dict[str, str] = {}  # the file of a cell that runs on the ranks -> the reader's name
_cells = itertools.count()
SAVE_FIGURES = "a figure is shown in notebooks only; save it with plt.savefig('figure.png')"
_MOST = 200_000  # characters of one source file that go into a trace


def shell() -> Any:
    """The IPython shell of this process, None outside IPython. Never imports IPython."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def in_notebook() -> bool:
    """True if there is a front end that can show pictures."""
    found = shell()
    return found is not None and hasattr(found, "kernel")


def show_figures(figures: list[tuple[int, bytes]]) -> None:
    """Show the ranks' PNG pictures, labelled; where that is not possible, say so."""
    for rank, picture in figures:
        print(f"[rank {rank}] {'' if in_notebook() else SAVE_FIGURES}")
        if in_notebook():
            from IPython.display import Image, display

            display(Image(picture))


def cell(depth: int = 2) -> object | None:
    """The identity of the notebook's cell, or of the line, that runs ``depth`` calls above."""
    if not in_notebook():
        return None
    metadata = (shell().kernel.get_parent("shell") or {}).get("metadata", {})
    if "cellId" in metadata:
        return str(metadata["cellId"])
    frame = sys._getframe(depth)
    return frame.f_code.co_filename, frame.f_lineno


class OfCells:
    """Objects by cell: running a cell again ends what it made before.

    Args:
        end: ends one of them.
    """

    def __init__(self, end: Callable[[Any], None]) -> None:
        self._end = end
        self._made: dict[object, tuple[str, weakref.WeakSet[Any]]] = {}

    def add(self, cell: object | None, thing: Any) -> None:
        """``cell`` makes this now; it may make several."""
        if cell is None:
            return
        header = (shell().kernel.get_parent("shell") or {}).get("header", {})
        this = str(header.get("msg_id", ""))
        then, earlier = self._made.get(cell, (this, weakref.WeakSet[Any]()))
        if then != this:
            for one in list(earlier):
                self._end(one)
            earlier = weakref.WeakSet()
        earlier.add(thing)
        self._made[cell] = this, earlier


def name_cell(text: str, count: int) -> str:
    """A file name for a cell whose code runs on the ranks, known from now on as ``In[count]``."""
    file, label = f"distkit-cell-{next(_cells)}", f"In[{count}]"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    _labels[file], _files[label] = label, file
    return file


def name_running_cell(source: str) -> str:
    """Give source code a name under which its lines can be shown: that of the running cell."""
    history = getattr(shell(), "history_manager", None)
    # its inputs begin with an empty one; execution_count is one more here in IPython 9, not in 8
    return name_cell(source, 0 if history is None else len(history.input_hist_raw) - 1)


@dataclass(frozen=True)
class Cell:
    """Source code for some ranks, in variables that stay there: what ``%%ranks`` runs."""

    source: str
    file: str
    ranks: list[int]
    __name__ = "cell"

    def __call__(self, namespace: dict[str, Any]) -> Any:
        """Run it; print the value of an expression in the last line, and return it."""
        tree = ast.parse(self.source, self.file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, self.file, "exec"), namespace)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), self.file, "eval"), namespace)
        if value is not None:
            print(repr(value))
        return value


def place(where: str) -> str:
    """``file:line`` as the reader knows it: ``In[5]:3`` for a cell, a short path for a file."""
    return _place(where, getattr(shell(), "execution_count", 0))


@lru_cache(4096)
def _place(where: str, count: int) -> str:
    """Like :func:`place`, while cell ``count`` runs: one that ran again has another number."""
    file, _, line = where.rpartition(":")
    return f"{_label(file, count)}:{line}" if file else where


@lru_cache(4096)
def _label(file: str, count: int) -> str:
    compiler = getattr(shell(), "compile", None)
    known = getattr(compiler, "format_code_name", lambda name: None)(file)
    label = _labels.get(file) or (str(known[1]) if known else _short(file))
    _files[label] = file
    return label


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:  # not below the current folder
        return Path(file).name


def sources(events: Iterable[Event], more: Iterable[str] = ()) -> dict[str, str]:
    """The text of every source that events, or ``more`` lines, point into, by the reader's name."""
    lines = {*more} | {
        line
        for e in events
        for line in (e.where, *map(e.attributes.get, LINES), *e.attributes.get(STACK, ()))
    }
    wanted = {line.rpartition(":")[0] for line in lines if line}
    return {label: text for label in sorted(wanted) if (text := _text(label))}


def _text(label: str) -> str:
    file = _files.get(label, label)
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))[:_MOST]
