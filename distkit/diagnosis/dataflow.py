"""Data flow analysis of the program's text: values and orders that depend on the rank.

No side effects.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef

#: Matches names, and parts of names, that identify the rank.
_RANK = re.compile(
    r"(?<![A-Za-z0-9_])(me|my_?id)(?![A-Za-z0-9_])|rank(?!s\b)"
    r"|is_?(main|master|chief|leader|root)|main_process|master|process_(index|id)",
    re.IGNORECASE,
)


def name_of(function: ast.AST) -> str:
    """Return the last part of a function's name: ``all_reduce`` of ``dist.all_reduce``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names_rank(value: ast.AST) -> bool:
    """Return whether an expression contains a name that identifies the rank."""
    return _RANK.search(ast.unparse(value)) is not None


def _sources(name: str, scopes: Sequence[ast.AST]) -> list[ast.AST]:
    """Return the values assigned to a name in its innermost scope, or returned by the function."""
    for scope in scopes:
        if values := list(assigned(name, scope)):
            return values
    return []


def assigned(name: str, scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the values that a scope assigns to a name, including a function's return values."""
    for node in _nodes_in(scope):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _bindings(name, target, node.value)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                yield from _bindings(name, node.target, node.value)
            case ast.AugAssign():
                yield from _bindings(name, node.target, node.value)
            case ast.For() | ast.AsyncFor():
                yield from _bindings(name, node.target, node.iter)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                for inner in _nodes_in(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield inner.value


# -- the same items in a different order ------------------------------------------------

_SORTS = "sorted", "reversed", "list", "tuple", "enumerate", "iter"


def reorders(value: ast.AST, scopes: Sequence[ast.AST], seen: frozenset[str] = frozenset()) -> bool:
    """Return whether an iterable has the same items on every rank, but in different orders.

    >>> tree = ast.parse("sorted(names, reverse=rank == 1), names[rank::4], reversed(names)")
    >>> [reorders(value, [tree]) for value in tree.body[0].value.elts]
    [True, False, False]
    """
    match value:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _SORTS:
            ordering = [k.value for k in value.keywords if k.arg in ("reverse", "key")]
            by_rank = any(map(names_rank, ordering))
            return by_rank or reorders(first, scopes, seen)
        case ast.IfExp() if names_rank(value.test):
            body, orelse = value.body, value.orelse
            return _without_order(body) == _without_order(orelse) and ast.unparse(
                body
            ) != ast.unparse(orelse)
        case ast.Name(id=name) if name not in seen:
            return any(reorders(v, scopes, seen | {name}) for v in _sources(name, scopes))
    return False


def _without_order(value: ast.AST) -> str:
    """Return an expression as text, without calls that only change the order."""
    match value:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _SORTS:
            return _without_order(first)
        case ast.Subscript(slice=ast.Slice(lower=None, upper=None)):
            return _without_order(value.value)
    return ast.unparse(value)


# -- assignments ---------------------------------------------------------------------------


def names_in(value: ast.AST) -> set[str]:
    """Return the names in an expression."""
    return {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}


def _nodes_in(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without the bodies of nested functions."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from _nodes_in(child)


def _bindings(name: str, target: ast.AST, value: ast.AST) -> Iterator[ast.AST]:
    if isinstance(target, ast.Name):
        if target.id == name:
            yield value
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = getattr(value, "elts", None)
        if values is not None and len(values) == len(target.elts):
            for part, part_value in zip(target.elts, values, strict=True):
                yield from _bindings(name, part, part_value)
        else:
            for part in target.elts:
                yield from _bindings(name, part, value)
