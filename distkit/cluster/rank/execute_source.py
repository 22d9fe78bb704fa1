"""Source code on the ranks, in variables that stay: what the ``%%ranks`` magic runs."""

from __future__ import annotations

import ast
from typing import Any

from distkit.cluster.notebook import name_cell, shell
from distkit.recording.trouble import Dropped


def known(source: str) -> str:
    """Give source code a name under which its lines can be shown: that of the running cell."""
    history = getattr(shell(), "history_manager", None)
    # its inputs begin with an empty one; execution_count is one more here in IPython 9, not in 8
    return name_cell(source, 0 if history is None else len(history.input_hist_raw) - 1)


def cell(source: str, file: str, ranks: list[int]) -> Any:
    """On a rank: run the code, print the value of an expression in the last line, return it."""
    from distkit.cluster.rank.rank import Rank

    here = Rank.here
    if here.spec.rank not in ranks:
        raise Dropped("the cell was not run on it")
    here.group.keep()  # as all that a cell makes
    here.modules.go_on()
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), here.namespace)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), file, "eval"), here.namespace)
    if value is not None:
        print(repr(value))
    return value
