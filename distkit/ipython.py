"""The additions of ``import distkit`` to IPython: ``%%ranks``, and errors in a line or two.

An error that distkit or torch raises about a mistake in a cell is shown with the cell's line and
the message. Any other error is shown as IPython does.
"""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).parent)

_TORCH = "-packages/torch/"

#: What torch says where there is no process group, and what is meant.
_NO_GROUP = "process group has not been initialized"
_ON_THE_RANKS = (
    "this runs in the notebook, which is no rank and has no process group. Call torch.distributed "
    "inside a function and give the function itself, without parentheses, to the ranks: "
    "cluster.run(fn)."
)


def install(shell: Any) -> None:
    """Have an IPython shell know ``%%ranks``, and shorten what it shows of such errors."""
    if "ranks" not in shell.magics_manager.magics["cell"]:
        shell.register_magic_function(_ranks, "cell", "ranks")
    shown = shell.InteractiveTB
    if not hasattr(shown, "distkit"):
        shown.distkit, shown.structured_traceback = True, _shortened(shown.structured_traceback)


def _ranks(line: str, cell: str) -> Any:
    """``%%ranks``, which imports the ranks' machinery when it is first used."""
    from IPython import get_ipython

    from distkit import magics

    shell = get_ipython()
    magics.load_ipython_extension(shell)
    return shell.run_cell_magic("ranks", line, cell)


def _shortened(structured: Any) -> Any:
    """IPython's ``structured_traceback``, for errors that concern a line of the reader's alone."""

    def structured_traceback(
        kind: Any, error: Any = None, tb: TracebackType | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(error, BaseException) and tb is not None:
            kind, error, tb = shorten(error, tb)
        return structured(kind, error, tb, *args, **kwargs)

    return structured_traceback


def shorten(
    error: BaseException, tb: TracebackType
) -> tuple[type[BaseException], BaseException, TracebackType]:
    """An error and its traceback as the reader of the cell should see them."""
    files = [frame.filename for frame in traceback.extract_tb(tb)]
    ours = files[-1].startswith(_PACKAGE) and _raised_on_purpose(tb)
    torchs = _NO_GROUP in str(error) and _TORCH in files[-1]
    first = next((i for i, f in enumerate(files) if f.startswith(_PACKAGE) or _TORCH in f), None)
    if not (ours or torchs) or not first:
        return type(error), error, tb
    if torchs:
        error = type(error)(_ON_THE_RANKS)
    error.__cause__, error.__suppress_context__ = None, True
    return type(error), error, _cut(tb, first)


def _raised_on_purpose(tb: TracebackType) -> bool:
    """True if the innermost line raises: a mistake in the library would fail elsewhere."""
    while tb.tb_next is not None:
        tb = tb.tb_next
    line = linecache.getline(tb.tb_frame.f_code.co_filename, tb.tb_lineno)
    return line.strip().startswith("raise ")


def _cut(tb: TracebackType, count: int) -> TracebackType:
    """The outermost frames of a traceback."""
    rest = _cut(tb.tb_next, count - 1) if count > 1 and tb.tb_next is not None else None
    return TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
