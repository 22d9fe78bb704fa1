"""Tensors as the worker hands them over: flat, in host memory, nobody else's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.placement import Part, dtype_name
from distkit.kvstore.protocol.wire import DTYPES
from distkit.kvstore.transport.memory import LARGE, empty

#: Sums of these are made in float32, and rounded once.
NARROW = torch.float16, torch.bfloat16

#: One key or several.
Keys: TypeAlias = "Key | Sequence[Key]"
#: For each key one tensor, or one for each device.
Values: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[Tensor | Sequence[Tensor]]"


def pairs(what: str, key: Keys, value: Values) -> list[tuple[Key, list[Tensor]]]:
    """Each key with the list of its tensors.

    Raises:
        KVStoreError: what is given is not keys and tensors, or not as many of each.
    """
    keys: list[Any] = each(key)
    values: list[Any] = list(value) if isinstance(key, (list, tuple)) else [value]
    if len(keys) != len(values):
        raise KVStoreError(
            f"{what} of {len(keys)} keys with {len(values)} tensors. Give one tensor per key, or "
            "one list of tensors (one per device) per key."
        )
    return [(k, _tensors(what, k, v)) for k, v in zip(keys, values, strict=True)]


def each(key: Keys) -> list[Key]:
    """The keys as a list.

    Raises:
        KVStoreError: one is neither a number nor a string.
    """
    keys: list[Any] = list(key) if isinstance(key, (list, tuple)) else [key]
    for k in keys:
        if type(k) not in (int, str):
            raise KVStoreError(f"{k!r} is not a key. Use an int or a str, or a list of them.")
    return keys


def grouped(found: list[tuple[Key, list[Tensor]]]) -> list[tuple[Key, list[Tensor]]]:
    """Each key once, with all its tensors."""
    if len(found) == 1:
        return found
    together: dict[Key, list[Tensor]] = {}
    for k, tensors in found:
        together.setdefault(k, []).extend(tensors)
    return list(together.items())


def by_priority(
    found: list[tuple[Key, Any]], priority: int | Sequence[int]
) -> list[tuple[Key, Any]]:
    """Keys of higher priority first, otherwise as they were given.

    Raises:
        KVStoreError: there is not one priority for each.
    """
    if isinstance(priority, int):
        return found
    if len(priority) != len(found):
        raise KVStoreError(f"{len(found)} keys with {len(priority)} priorities. Give one for each.")
    order = sorted(range(len(found)), key=lambda i: -priority[i])
    return [found[i] for i in order]


def _tensors(what: str, key: Key, value: Any) -> list[Tensor]:
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    for t in tensors or [None]:
        if not isinstance(t, Tensor):
            remedy = (
                "Give a tensor (torch.as_tensor(x) makes one of a number, a list or an array), "
                "or a list of tensors, one for each device."
            )
            if what == "push" and tensors and t is None:
                remedy = "There is no gradient yet: call backward() first."
            raise KVStoreError(f"{what} of {key!r} got {_kind(value)}. {remedy}")
        if dtype_name(t) not in DTYPES:
            raise KVStoreError(
                f"{what} of {key!r} with {t.dtype}, which cannot be added up. "
                f"Use one of {', '.join(DTYPES)}."
            )
    return tensors


def _kind(value: Any) -> str:
    """The type of an argument, for messages: a value may be long."""
    kind = named(type(value))
    if not isinstance(value, (list, tuple)):
        return kind
    kinds = dict.fromkeys(named(type(v)) for v in value)
    return f"{kind}[{', '.join(kinds)}]" if kinds else f"an empty {kind}"


def named(kind: type) -> str:
    """A type as users know it: ``torch.optim.SGD``, which is in ``torch.optim.sgd``."""
    name, module = kind.__qualname__, kind.__module__
    package = module.rpartition(".")[0]
    if getattr(sys.modules.get(package), name, None) is kind:
        module = package
    return name if module == "builtins" else f"{module}.{name}"


def fresh(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of a worker's tensors of one key: flat, in host memory, a copy.

    The caller may change its tensors at once, while the copy is on its way.
    """
    first, *rest = (t.detach() for t in tensors)
    total = empty(first.numel(), first.dtype).view(first.shape)
    if rest and first.dtype in NARROW:
        total.copy_(sum((t.to("cpu").float() for t in rest), first.to("cpu").float()))
        return total.view(-1)
    if len(rest) and first.device.type == "cpu":
        torch.add(first, rest.pop(0).to("cpu"), out=total)
    else:
        total.copy_(first)
    for t in rest:
        total += t.to("cpu")
    return total.view(-1)


def unchanged(tensors: Sequence[Tensor]) -> Tensor:
    """The same for a caller that leaves its tensors alone meanwhile: one small tensor is itself."""
    first = tensors[0]
    small = first.nbytes < LARGE and first.device.type == "cpu" and first.is_contiguous()
    return first.detach().view(-1) if small and len(tensors) == 1 else fresh(tensors)


def whole(values: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The parts of an array, put together."""
    return torch.cat(list(values)).view(shape)  # also of one: it is the server's memory


def write(out: Tensor, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
    """Write the parts of an array to a tensor on any device."""
    if out.layout is not torch.strided:
        with torch.no_grad():  # a detached one would keep its own rows
            out.copy_(whole(values, tuple(out.shape)).to(out.device, out.dtype).to_sparse(1))
        return
    out = out.detach()
    if not out.is_contiguous():
        out.copy_(whole(values, tuple(out.shape)))
        return
    flat = out.view(-1)
    for part, value in zip(parts, values, strict=True):
        cut(flat, part).copy_(value)


def cut(flat: Tensor, part: Part) -> Tensor:
    """A part of an array: all of it, mostly."""
    return flat if part.stop - part.start == flat.numel() else flat[part.start : part.stop]
