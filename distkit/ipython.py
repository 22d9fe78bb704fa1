"""The IPython extension that ``import distkit`` loads: ``%%ranks``, cards, short error messages.

::

    %%ranks                     run the cell on every rank
    %%ranks 0,2                 only on these ranks
    %%ranks --step              pause before each communication call, in the cockpit
    %%ranks --seed 3            seed the random numbers

Each is a short form of :meth:`distkit.Cluster.execute` on the latest cluster.

Errors that distkit raises, and torch's error for a missing process group, are shown as the cell's
line and the message. IPython shows other errors as usual.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from html import escape
from types import TracebackType
from typing import Any, TextIO

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from distkit.errors import PACKAGE_PATHS, DistkitError, RankError, RunStopped, brief_traceback
from distkit.views.scene import figures

_TORCH = "-packages/torch/"

#: torch's message for a missing process group, and its replacement.
_NO_GROUP = "process group has not been initialized"
_NOT_A_RANK = (
    "this runs in the notebook, which is not a rank and has no process group. Call "
    "torch.distributed inside a function, and pass the function itself, without parentheses, to "
    "the ranks: cluster.run(fn)."
)


def install(shell: Any) -> None:
    """Add ``%%ranks`` and HTML cards to a shell, and shorten tracebacks for users' mistakes."""
    show_as_html(shell)
    if hasattr(shell, "kernel"):
        warnings.showwarning = _show_warning
    shell.register_magic_function(ranks, "cell")
    printer = shell.InteractiveTB
    if not hasattr(printer, "distkit"):
        printer.distkit, printer.structured_traceback = (
            True,
            _with_short_errors(printer.structured_traceback),
        )


def show_as_html(shell: Any) -> None:
    """Make a shell show findings and figures as HTML in the style of the views."""
    formatter = shell.display_formatter.formatters["text/html"]
    # pyplot's backend for notebooks removes the formatters of Figure itself
    formatter.for_type_by_name("matplotlib.figure", "FigureBase", figures.to_html)
    formatter.for_type_by_name("distkit.diagnosis.rules", "Finding", figures.finding_card)


# -- warnings ---------------------------------------------------------------------------------


_show_text = warnings.showwarning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning from distkit as a card, and any other warning as text."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "warnings" in frame.f_globals["__name__"]:
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(PACKAGE_PATHS):
        _show_text(message, category, filename, lineno, file, line)
        return
    from IPython.display import display

    notice = getattr(message, "notice", str(message))
    if isinstance(notice, str):
        where = f" at {filename}:{lineno}" if filename.startswith("In[") else ""
        card = figures.card(f"Warning{where}", f"<p>{figures.with_code(escape(notice))}</p>")
    else:
        card = figures.finding_card(notice)
    text = warnings.formatwarning(message, category, filename, lineno, line="")
    display({"text/html": card, "text/plain": text.strip()}, raw=True)


# -- %%ranks -----------------------------------------------------------------------------------


_options = MagicArgumentParser(prog="%%ranks", add_help=False)
_options.add_argument("--step", action="store_true")
_options.add_argument("--seed", type=int)
_options.add_argument("ranks", nargs="*", type=int)


def ranks(line: str, cell: str) -> Any:
    """Run a cell on the ranks of the latest cluster, each with separate variables.

    ``torch``, ``dist``, ``rank`` and ``world_size`` are defined; variables persist between cells.
    """
    from distkit.cluster.cluster import latest
    from distkit.cluster.notebook import line_label, name_running_cell

    args = _options.parse_args(line.replace(",", " ").split())
    cluster = latest()
    if cluster is None:
        raise UsageError("no cluster is running. Start one first: cluster = dk.Cluster(4)")
    file = name_running_cell(f"%%ranks {line}".rstrip() + f"\n{cell}")
    try:
        return cluster.execute(
            "\n" + cell, args.ranks or None, step=args.step, file=file, seed=args.seed
        )
    except SyntaxError as error:
        error.filename = line_label(f"{file}:0").rpartition(":")[0]
        raise
    except (DistkitError, RunStopped) as error:
        if isinstance(error, RankError):
            _explain_name(error)
        head = error._render_traceback_()[-1:]  # without the frames of the magic
        error.__dict__["_render_traceback_"] = lambda: head
        raise


def _explain_name(error: RankError) -> None:
    """Add a hint if an error reports an undefined name that is a variable of the notebook."""
    from IPython import get_ipython

    name = str(error).partition("name '")[2].partition("' is not defined")[0]
    if name in get_ipython().user_ns:
        error.args = (
            f"{error.args[0]}\n{name} is a variable of the notebook, but not of the ranks: set it "
            "in a %%ranks cell.",
        )


# -- errors ------------------------------------------------------------------------------------


def _with_short_errors(original: Any) -> Any:
    """Wrap IPython's ``structured_traceback``, to shorten tracebacks for users' mistakes."""

    def structured_traceback(
        kind: Any, error: Any = None, tb: TracebackType | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if tb is not None:
            line = traceback.extract_tb(tb)[-1]
            if line.filename.startswith(PACKAGE_PATHS) and str(line.line).startswith("raise "):
                return brief_traceback(error)  # distkit raised the error deliberately
            if _NO_GROUP in str(error) and _TORCH in line.filename:
                return brief_traceback(type(error)(_NOT_A_RANK).with_traceback(tb))
        return original(kind, error, tb, *args, **kwargs)

    return structured_traceback
