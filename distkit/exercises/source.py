"""The answer key: the library's own pages, as text that runs in a notebook's cell."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


class Source(str):
    """A program's text, which a notebook shows with its colours."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}\n```"


def source(page: Callable[..., Any]) -> Source:
    """A page with the imports that it needs."""
    home = inspect.getmodule(inspect.unwrap(page))
    assert home is not None
    code = inspect.getsource(page).rstrip()
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return Source("\n".join([*_imports(home, used - {page.__name__}), "", "", code]))


def _imports(home: ModuleType, used: set[str]) -> Iterator[str]:
    """The lines with which a module gets these names, and one for those it defines."""
    own = []
    for node in ast.parse(inspect.getsource(home)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [a for a in node.names if (a.asname or a.name) in used]
            if node.names:
                yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in used:
            own.append(node.name)
    if own:
        yield f"from {home.__name__} import {', '.join(own)}"
