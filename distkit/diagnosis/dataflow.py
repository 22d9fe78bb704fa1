"""Data flow analysis of the program's text: rank-dependent values and tensor names. Pure."""

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

_MAX_DEPTH = 4  # maximum number of assignments followed


def name_of(function: ast.AST) -> str:
    """Return the last part of a function's name: ``all_reduce`` of ``dist.all_reduce``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names_rank(value: ast.AST) -> bool:
    """Return whether an expression contains a name that identifies the rank."""
    return _RANK.search(ast.unparse(value)) is not None


def depends_on_rank(
    value: ast.AST, scopes: Sequence[ast.AST], seen: frozenset[str] = frozenset()
) -> bool:
    r"""Return whether an expression depends on the rank, judging by names and assignments.

    Args:
        value: the expression.
        scopes: the enclosing functions, innermost first, and the module.
        seen: names already followed.

    >>> tree = ast.parse("me, n = get_rank(), get_world_size()\nfirst = me == 0\n")
    >>> [depends_on_rank(ast.Name(name), [tree]) for name in ("first", "n")]
    [True, False]
    """
    if names_rank(value):
        return True
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - seen
    if len(seen) >= _MAX_DEPTH:
        return False
    return any(
        depends_on_rank(source, scopes, seen | {name})
        for name in names
        for source in _sources(name, scopes)
    )


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
            by_rank = any(depends_on_rank(argument, scopes) for argument in ordering)
            return by_rank or reorders(first, scopes, seen)
        case ast.IfExp() if depends_on_rank(value.test, scopes):
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


def names_behind(value: ast.AST, scopes: Sequence[ast.AST]) -> set[str]:
    """Return the names in an expression and, recursively, in the values assigned to them."""
    names = {n.id for n in _names(value)}
    for _ in range(_MAX_DEPTH):
        names |= {n.id for name in names for s in _sources(name, scopes) for n in _names(s)}
    return names


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


# -- calls and the names of their tensors ---------------------------------------------------


def calls_at(scope: ast.AST, number: int, names: Sequence[str]) -> list[ast.Call]:
    """Return the calls of functions with these names on one line."""
    return [
        n
        for n in ast.walk(scope)
        if isinstance(n, ast.Call) and name_of(n.func) in names and n.lineno == number
    ]


def argument(scopes: Sequence[ast.AST], number: int, op: str, nth: int) -> str:
    r"""Return the name of the tensor of a line's ``nth`` send or receive; "" if unknown.

    A call to ``batch_isend_irecv`` performs the operations of its list in order.

    >>> text = "ops = [P2POp(isend, act, 1), P2POp(irecv, grad, 1)]\nbatch_isend_irecv(ops)"
    >>> argument([ast.parse(text)], 2, "recv", 0)
    'grad'
    """
    if calls := calls_at(scopes[0], number, (op, f"i{op}")):
        return _name_of_first(calls[0].args[:1]) if len(calls) == 1 else ""
    batches = calls_at(scopes[0], number, ("batch_isend_irecv",))
    operations: ast.AST | None = (
        batches[0].args[0] if len(batches) == 1 and batches[0].args else None
    )
    if isinstance(operations, ast.Name):
        sources = _sources(operations.id, scopes)
        operations = sources[0] if len(sources) == 1 else None
    matching = [
        entry
        for entry in getattr(operations, "elts", ())
        if isinstance(entry, ast.Call) and entry.args and name_of(entry.args[0]) == f"i{op}"
    ]
    return _name_of_first(matching[nth % len(matching)].args[1:2]) if matching else ""


def _name_of_first(arguments: Sequence[ast.AST]) -> str:
    return arguments[0].id if arguments and isinstance(arguments[0], ast.Name) else ""


#: Parts of names that describe the use of a tensor, not its identity.
_GENERIC_PARTS = frozenset(
    "new old recv received send sent out in input output buf buffer buffers tensor tensors got get "
    "other their their my mine own from to next prev previous left right tmp temp data".split()
)


def resemble(one: str, other: str) -> bool:
    """Return whether two names share a word that identifies a tensor.

    >>> resemble("act", "new_act"), resemble("recv_buf", "send_buf"), resemble("x", "x")
    (True, False, False)
    """
    parts = [
        {w for w in re.findall(r"[a-z]{3,}", n.lower())} - _GENERIC_PARTS for n in (one, other)
    ]
    return not parts[0].isdisjoint(parts[1])


# -- dependence on the order ---------------------------------------------------------------

_NONCOMMUTATIVE = ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult


def order_matters(receives: Sequence[ast.Call], scope: ast.AST) -> bool:
    """Return whether the result depends on the order of the received messages.

    The text must show it: the program computes a difference, or returns a list in order of arrival
    or a single value. A sum, maximum or set does not depend on the order. A call whose return value
    is used is assumed to check the sender.
    """
    parents = {id(c): n for n in ast.walk(scope) for c in ast.iter_child_nodes(n)}
    if any(_is_used(call, parents) for call in receives):
        return False
    targets = [call.args[0] for call in receives if call.args]
    lists = {
        _name_of_first([target.value]) for target in targets if isinstance(target, ast.Subscript)
    } - {""}
    buffers = {_name_of_first([target]) for target in targets} - {""}
    if len(buffers) + len(lists) < len({ast.unparse(target) for target in targets}):
        return False
    for node in ast.walk(scope):  # names of received tensors
        if isinstance(node, ast.Assign) and _source_name(node.value) in buffers:
            buffers |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    first = min(call.lineno for call in receives)
    uses = [
        n
        for n in _names(scope)
        if n.id in buffers and isinstance(n.ctx, ast.Load) and n.lineno >= first
    ]
    return any(_list_depends_on_order(name, scope, parents) for name in lists) or any(
        _use_depends_on_order(use, parents, scope, buffers, separate=len(targets) > 1)
        for use in uses
        if not any(use is target for target in targets)
    )


def _source_name(value: ast.AST) -> str:
    """Return the name of the tensor that an expression reads: ``y`` of ``float(y[0].item())``."""
    while not isinstance(value, ast.Name):
        match value:
            case ast.Call(func=ast.Name(id="float" | "int"), args=[inner]):
                value = inner
            case ast.Call(func=ast.Attribute() as method, args=[]):
                value = method.value
            case ast.Subscript(value=inner) | ast.Attribute(value=inner):
                value = inner
            case _:
                return ""
    return value.id


def _names(node: ast.AST) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name)]


def _is_used(call: ast.Call, parents: dict[int, ast.AST]) -> bool:
    """Return whether the program uses a blocking receive's result, the sender's rank."""
    return name_of(call.func) == "recv" and not isinstance(parents.get(id(call)), ast.Expr)


def _use_depends_on_order(
    use: ast.AST, parents: dict[int, ast.AST], scope: ast.AST, buffers: set[str], separate: bool
) -> bool:
    """Return whether a use of a received value depends on the order of messages."""
    node: ast.AST = use
    while (parent := parents.get(id(node))) is not None:
        match parent:
            case ast.BinOp(op=operation):
                other = parent.right if node is parent.left else parent.left
                if any(n.id in buffers for n in _names(other)):
                    return isinstance(operation, _NONCOMMUTATIVE)
                if not isinstance(other, ast.Constant):
                    return False  # cannot be decided: combined with another value
            case ast.Call(func=function) if node is not function:
                name = name_of(function)
                if name in ("append", "extend"):
                    target = function.value if isinstance(function, ast.Attribute) else None
                    return isinstance(target, ast.Name) and _list_depends_on_order(
                        target.id, scope, parents
                    )
                if name not in ("float", "int", "bool", "str"):
                    return False
            case ast.Return():
                return separate or not isinstance(node, (ast.List, ast.Tuple))
            case ast.Attribute() | ast.Subscript() | ast.Call() | ast.UnaryOp():
                pass
            case _:
                return False
        node = parent
    return False


def _list_depends_on_order(name: str, scope: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """Return whether the program returns a list in order of arrival or indexes it by a constant."""
    for use in _names(scope):
        if use.id != name or not isinstance(use.ctx, ast.Load):
            continue
        parent = parents.get(id(use))
        if isinstance(parent, ast.Return) or (
            isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant)
        ):
            return True
    return False
