"""Where values come from in the program's text: what differs from rank to rank, and names. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef

#: Names, and parts of names, that tell one rank from another.
_RANK = re.compile(
    r"(?<![A-Za-z0-9_])(me|my_?id)(?![A-Za-z0-9_])|rank(?!s\b)"
    r"|is_?(main|master|chief|leader|root)|main_process|master|process_(index|id)",
    re.IGNORECASE,
)

_DEEPEST = 4  # assignments that are followed


def name_of(function: ast.AST) -> str:
    """The last part of a function's name: ``all_reduce`` of ``dist.all_reduce``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names_rank(value: ast.AST) -> bool:
    """True if an expression speaks of the rank itself."""
    return _RANK.search(ast.unparse(value)) is not None


def depends_on_rank(
    value: ast.AST, scopes: Sequence[ast.AST], seen: frozenset[str] = frozenset()
) -> bool:
    r"""True if an expression tells one rank from another, as far as names and assignments say.

    Args:
        value: the expression.
        scopes: the functions around it, the innermost first, and the module.
        seen: names that were followed already.

    >>> tree = ast.parse("me, n = get_rank(), get_world_size()\nfirst = me == 0\n")
    >>> [depends_on_rank(ast.Name(name), [tree]) for name in ("first", "n")]
    [True, False]
    """
    if names_rank(value):
        return True
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - seen
    if len(seen) >= _DEEPEST:
        return False
    return any(
        depends_on_rank(source, scopes, seen | {name})
        for name in names
        for source in _sources(name, scopes)
    )


def _sources(name: str, scopes: Sequence[ast.AST]) -> list[ast.AST]:
    """What is assigned to a name in the innermost scope that does; or what a function returns."""
    for scope in scopes:
        if found := list(assigned(name, scope)):
            return found
    return []


def assigned(name: str, scope: ast.AST) -> Iterator[ast.AST]:
    """The values that a scope gives a name, those of a function's ``return`` included."""
    for node in _own(scope):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _bound(name, target, node.value)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                yield from _bound(name, node.target, node.value)
            case ast.AugAssign():
                yield from _bound(name, node.target, node.value)
            case ast.For() | ast.AsyncFor():
                yield from _bound(name, node.target, node.iter)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                for inner in _own(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield inner.value


# -- the same things in another order ---------------------------------------------------

_SORTS = "sorted", "reversed", "list", "tuple", "enumerate", "iter"
_VIEWS = "items", "keys", "values"


def reorders(value: ast.AST, scopes: Sequence[ast.AST], seen: frozenset[str] = frozenset()) -> bool:
    """True if what a loop takes is the same on every rank, but in another order on some.

    >>> tree = ast.parse("sorted(names, reverse=rank == 1), names[rank::4], reversed(names)")
    >>> [reorders(value, [tree]) for value in tree.body[0].value.elts]
    [True, False, False]
    """
    match value:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _SORTS:
            asked = [k.value for k in value.keywords if k.arg in ("reverse", "key")]
            by_rank = any(depends_on_rank(one, scopes) for one in asked)
            return by_rank or reorders(first, scopes, seen)
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _VIEWS:
            return reorders(inner, scopes, seen)
        case ast.IfExp() if depends_on_rank(value.test, scopes):
            one, other = value.body, value.orelse
            return _unsorted(one) == _unsorted(other) and ast.unparse(one) != ast.unparse(other)
        case ast.Subscript(slice=ast.Slice(lower=None, upper=None, step=ast.AST() as step)):
            return depends_on_rank(step, scopes) or reorders(value.value, scopes, seen)
        case ast.Name(id=name) if name not in seen:
            return any(reorders(v, scopes, seen | {name}) for v in _sources(name, scopes))
    return False


def _unsorted(value: ast.AST) -> str:
    """An expression without what only changes an order."""
    match value:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _SORTS:
            return _unsorted(first)
        case ast.Subscript(slice=ast.Slice(lower=None, upper=None)):
            return _unsorted(value.value)
    return ast.unparse(value)


# -- assignments ---------------------------------------------------------------------------


def names_behind(value: ast.AST, scopes: Sequence[ast.AST]) -> set[str]:
    """The names in an expression, and those that went into what is assigned to them."""
    found = {n.id for n in _names(value)}
    for _ in range(_DEEPEST):
        found |= {n.id for name in found for s in _sources(name, scopes) for n in _names(s)}
    return found


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, functions inside of it without their bodies."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from _own(child)


def _bound(name: str, target: ast.AST, value: ast.AST) -> Iterator[ast.AST]:
    if isinstance(target, ast.Name):
        if target.id == name:
            yield value
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = getattr(value, "elts", None)
        if values is not None and len(values) == len(target.elts):
            for one, part in zip(target.elts, values, strict=True):
                yield from _bound(name, one, part)
        else:
            for one in target.elts:
                yield from _bound(name, one, value)


# -- calls and the names of their tensors ---------------------------------------------------


def calls_at(scope: ast.AST, number: int, names: Sequence[str]) -> list[ast.Call]:
    """The calls of functions of these names on one line."""
    return [
        n
        for n in ast.walk(scope)
        if isinstance(n, ast.Call) and name_of(n.func) in names and n.lineno == number
    ]


def argument(scopes: Sequence[ast.AST], number: int, op: str, nth: int) -> str:
    r"""The name of the tensor of a line's ``nth`` send or receive; "" if the text does not tell.

    A call of ``batch_isend_irecv`` makes those that its list has, in their order.

    >>> text = "ops = [P2POp(isend, act, 1), P2POp(irecv, grad, 1)]\nbatch_isend_irecv(ops)"
    >>> argument([ast.parse(text)], 2, "recv", 0)
    'grad'
    """
    if calls := calls_at(scopes[0], number, (op, f"i{op}")):
        return _plain(calls[0].args[:1]) if len(calls) == 1 else ""
    batches = calls_at(scopes[0], number, ("batch_isend_irecv",))
    given: ast.AST | None = batches[0].args[0] if len(batches) == 1 and batches[0].args else None
    if isinstance(given, ast.Name):
        sources = _sources(given.id, scopes)
        given = sources[0] if len(sources) == 1 else None
    made = [
        entry
        for entry in getattr(given, "elts", ())
        if isinstance(entry, ast.Call) and entry.args and name_of(entry.args[0]) == f"i{op}"
    ]
    return _plain(made[nth % len(made)].args[1:2]) if made else ""


def _plain(arguments: Sequence[ast.AST]) -> str:
    return arguments[0].id if arguments and isinstance(arguments[0], ast.Name) else ""


#: Parts of names that tell what is done with a tensor, not which it is.
_ROLES = frozenset(
    "new old recv received send sent out in input output buf buffer buffers tensor tensors got get "
    "other their their my mine own from to next prev previous left right tmp temp data".split()
)


def resemble(one: str, other: str) -> bool:
    """True if two names have a word in common that says what they name.

    >>> resemble("act", "new_act"), resemble("recv_buf", "send_buf"), resemble("x", "x")
    (True, False, False)
    """
    parts = [{w for w in re.findall(r"[a-z]{3,}", n.lower())} - _ROLES for n in (one, other)]
    return not parts[0].isdisjoint(parts[1])


# -- whether an order matters -------------------------------------------------------------

_UNSYMMETRIC = ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult


def order_matters(receives: Sequence[ast.Call], scope: ast.AST) -> bool:
    """True if what is received first is used otherwise than what comes second.

    Only what the text shows counts: a difference, a list that is returned as it grew, a value that
    is returned for itself. A sum, a maximum or a set is the same in any order; and a call whose
    value is used is taken to look at the sender.
    """
    parents = {id(c): n for n in ast.walk(scope) for c in ast.iter_child_nodes(n)}
    if any(_is_used(call, parents) for call in receives):
        return False
    given = [call.args[0] for call in receives if call.args]
    filled = {_plain([g.value]) for g in given if isinstance(g, ast.Subscript)} - {""}
    buffers = {_plain([g]) for g in given} - {""}
    if len(buffers) + len(filled) < len({ast.unparse(g) for g in given}):
        return False
    for node in ast.walk(scope):  # names of what was received
        if isinstance(node, ast.Assign) and _taken_from(node.value) in buffers:
            buffers |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    first = min(call.lineno for call in receives)
    uses = [
        n
        for n in _names(scope)
        if n.id in buffers and isinstance(n.ctx, ast.Load) and n.lineno >= first
    ]
    return any(_shows_list(name, scope, parents) for name in filled) or any(
        _shows_order(use, parents, scope, buffers, apart=len(given) > 1)
        for use in uses
        if not any(use is g for g in given)
    )


def _taken_from(value: ast.AST) -> str:
    """The name of the tensor that an expression only reads: ``y`` of ``float(y[0].item())``."""
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
    """True if the value of a blocking receive, which is the sender's rank, is used."""
    return name_of(call.func) == "recv" and not isinstance(parents.get(id(call)), ast.Expr)


def _shows_order(
    use: ast.AST, parents: dict[int, ast.AST], scope: ast.AST, buffers: set[str], apart: bool
) -> bool:
    """True if an expression of a received value depends on which message came first."""
    node: ast.AST = use
    while (above := parents.get(id(node))) is not None:
        match above:
            case ast.BinOp(op=operation):
                other = above.right if node is above.left else above.left
                if any(n.id in buffers for n in _names(other)):
                    return isinstance(operation, _UNSYMMETRIC)
                if not isinstance(other, ast.Constant):
                    return False  # with something of the program's: unknown
            case ast.Call(func=function) if node is not function:
                name = name_of(function)
                if name in ("append", "extend"):
                    grown = function.value if isinstance(function, ast.Attribute) else None
                    return isinstance(grown, ast.Name) and _shows_list(grown.id, scope, parents)
                if name not in ("float", "int", "bool", "str"):
                    return False
            case ast.Return():
                return apart or not isinstance(node, (ast.List, ast.Tuple))
            case ast.Attribute() | ast.Subscript() | ast.Call() | ast.UnaryOp():
                pass
            case _:
                return False
        node = above
    return False


def _shows_list(name: str, scope: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """True if a list is returned as it grew, or its entries are told apart by their place."""
    for use in _names(scope):
        if use.id != name or not isinstance(use.ctx, ast.Load):
            continue
        above = parents.get(id(use))
        if isinstance(above, ast.Return) or (
            isinstance(above, ast.Subscript) and isinstance(above.slice, ast.Constant)
        ):
            return True
    return False
