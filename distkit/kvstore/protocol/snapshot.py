"""All that a server keeps, as plain text and one tensor of bytes each: a copy begins with it. Pure.

Nothing is pickled: there are JSON's own types, the containers of Python, tensors, and the few
classes in :data:`_CLASSES`, whose fields are such values in turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from distkit.errors import KVStoreError
from distkit.kvstore.protocol import entry, messages, placement
from distkit.kvstore.protocol.messages import Portion
from distkit.kvstore.protocol.optimizer import from_spec, to_spec
from distkit.kvstore.protocol.wire import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from distkit.kvstore.protocol.server import KVServer

#: What may be in a snapshot beside plain values.
_CLASSES: dict[str, Any] = {
    name: getattr(module, name)
    for module, name in (
        (entry, "Entry"),
        (entry, "Ledger"),
        (placement, "Layout"),
        (messages, "Push"),
    )
}

_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "Counter": lambda p: Counter(dict(p)),
}

#: What a server has from the terms of its run, or what is asked again, or goes in its own portion.
_NOT_KEPT = {
    "rule",
    "on_crash",
    "must_update",
    "watch",
    "elastic",
    "updater",
    "entries",
    "optimizer",
    "_early",
}

_ALIGN = 16


def portions(run: int, server: int, store: KVServer) -> list[Portion]:
    """All that a server keeps: what concerns all its keys, then one portion for each key.

    Pulls that wait are not among it: who waits asks again whoever serves next.
    """
    mine = {name: value for name, value in vars(store).items() if name not in _NOT_KEPT}
    rule = None if store.optimizer is None else to_spec(store.optimizer)
    whole: list[Any] = [(mine, rule)]
    whole += [(key, replace(kept, waiting={})) for key, kept in store.entries.items()]
    last = len(whole) - 1
    return [Portion(run, server, n, *pack(what), last - n) for n, what in enumerate(whole)]


def restore(store: KVServer, found: Iterable[Portion]) -> KVServer:
    """A fresh server becomes the one that these portions are of.

    Raises:
        KVStoreError: malformed.
    """
    first, *keys = (unpack(p.text, p.value) for p in found)
    mine, rule = first
    vars(store).update(mine)
    store.optimizer = None if rule is None else from_spec(*rule)
    store.entries = dict(keys)
    return store


def pack(value: Any) -> tuple[str, Tensor]:
    """A value as JSON, and the bytes of the tensors in it.

    >>> pack(({1, 2}, "w", torch.ones(2)))[0]
    '["tuple",[["set",[1,2]],"w",["tensor","float32",[2],0,8]]]'
    """
    found: list[Tensor] = []
    size = 0

    def tree(it: Any) -> Any:
        nonlocal size
        if isinstance(it, torch.Tensor):
            if it.is_sparse:
                it = it.coalesce()
                return ["sparse", [tree(it.indices()), tree(it.values()), list(it.shape)]]
            flat = it.detach().contiguous().view(-1).view(torch.uint8)
            start, shape = size, list(it.shape)
            found.extend((flat, torch.zeros(-len(flat) % _ALIGN, dtype=torch.uint8)))
            size += len(flat) + -len(flat) % _ALIGN
            return ["tensor", placement.dtype_name(it), shape, start, len(flat)]
        name = type(it).__name__
        if isinstance(it, dict):
            return [name, [[tree(k), tree(v)] for k, v in it.items()]]
        if name in _CONTAINERS:
            return [name, [tree(one) for one in it]]
        if name in _CLASSES:
            return [name, [tree(getattr(it, field)) for field in type(it).__match_args__]]
        if it is None or isinstance(it, (bool, int, float, str)):
            return it
        raise KVStoreError(f"a server keeps a {name}, of which no copy can be made.")

    text = json.dumps(tree(value), separators=(",", ":"))
    return text, torch.cat(found) if found else torch.zeros(0, dtype=torch.uint8)


def unpack(text: str, data: Tensor | None) -> Any:
    """Undo :func:`pack`.

    Raises:
        KVStoreError: malformed.
    """
    store = torch.zeros(0, dtype=torch.uint8) if data is None else data

    def value(it: Any) -> Any:
        if not isinstance(it, list):
            return it
        name, *rest = it
        if name == "tensor":
            dtype, shape, start, size = rest
            part = store[start : start + size].clone()  # ours, and aligned
            return part.view(DTYPES[dtype]).view(shape)
        if name == "sparse":
            indices, values, shape = rest[0]
            made = value(indices), value(values), shape
            return torch.sparse_coo_tensor(*made, is_coalesced=True, check_invariants=True)
        if name in ("dict", "Counter"):
            return _CONTAINERS[name]([(value(k), value(v)) for k, v in rest[0]])
        inner = [value(one) for one in rest[0]]
        return _CONTAINERS[name](inner) if name in _CONTAINERS else _CLASSES[name](*inner)

    try:
        return value(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError) as e:
        raise KVStoreError(f"no part of a server's copy: {type(e).__name__}: {e}.") from None
