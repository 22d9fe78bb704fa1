"""Tensors as the worker hands them over: flat, in host memory, nobody else's.

One gradient is made from those of a worker's devices. Without ``device`` in a store's name each
device's gradient is copied to host memory and added there; with it they are added on the first of
the devices, and one sum is copied: fewer copies, more device memory. Source: MXNet's ``device``
and ``dist_sync_device``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.optimizer import summed
from distkit.kvstore.protocol.placement import DTYPES, Part, dtype_name
from distkit.kvstore.transport.memory import empty

#: One key or several.
Keys: TypeAlias = "Key | Sequence[Key]"
#: For each key one tensor, or one for each device.
Values: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[Tensor | Sequence[Tensor]]"


def by_key(what: str, key: Keys, value: Values) -> dict[Key, list[Tensor]]:
    """The tensors of each key, also of one that is given twice.

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
    found: dict[Key, list[Tensor]] = {k: [] for k in keys}
    for k, v in zip(keys, values, strict=True):
        found[k] += _tensors(what, k, v)
    return found


def each(key: Keys) -> list[Key]:
    """The keys as a list.

    Raises:
        KVStoreError: one is neither a number of at most 64 bits nor a string.
    """
    keys: list[Any] = list(key) if isinstance(key, (list, tuple)) else [key]
    for k in keys:
        if type(k) not in (int, str):
            raise KVStoreError(f"{k!r} is not a key. Use an int or a str, or a list of them.")
        if type(k) is int and not -(2**63) <= k < 2**63:
            raise KVStoreError(f"key {k} has more than 64 bits. Use a smaller number, or str(key).")
    return keys


def _tensors(what: str, key: Key, value: Any) -> list[Tensor]:
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    for t in tensors or [None]:
        if not isinstance(t, Tensor):
            got = type(t).__name__ if tensors else "no tensor"
            raise KVStoreError(
                f"{what} of {key!r} got {got}. Give a tensor (torch.as_tensor(x) makes one of a "
                "number, a list or an array; a gradient is None before backward()), or a list of "
                "tensors, one for each device."
            )
        if t.layout is not torch.strided:
            raise KVStoreError(
                f"{what} of {key!r} with a sparse tensor, which no server takes. Give "
                "tensor.to_dense(), or make such gradients dense: Embedding(..., sparse=False)."
            )
        if dtype_name(t) not in DTYPES:
            raise KVStoreError(
                f"{what} of {key!r} with {t.dtype}, which cannot be added up. "
                f"Use one of {', '.join(DTYPES)}."
            )
    return tensors


def fresh(tensor: Tensor) -> Tensor:
    """A flat copy in host memory: the caller may change its tensor while the copy is sent."""
    copy = empty(tensor.numel(), tensor.dtype)
    copy.view(tensor.shape).copy_(tensor.detach())
    return copy


def whole(values: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The parts of an array, put together."""
    return torch.cat(list(values)).view(shape)  # also of one: it is the server's memory


def write(out: Tensor, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
    """Write the parts of an array to a tensor on any device."""
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


@dataclass
class Traffic:
    """The total size of a worker's pushes so far, in bytes.

    ``gradients``: of all its devices; ``to_host``: copied from a device's memory to the host's;
    ``held``: the most device memory that a sum took; ``sent``: that left for the servers.
    """

    gradients: int = 0
    to_host: int = 0
    held: int = 0
    sent: int = 0


def add_up(tensors: Sequence[Tensor], where: str, traffic: Traffic, *, copy: bool = True) -> Tensor:
    """The sum of a worker's tensors of one key: flat.

    Args:
        tensors: one for each device.
        where: "host": copied there, added there. "device": added on the first device, the sum
            copied to the host. "stay": added on the first device, where the sum stays.
        traffic: counts the bytes.
        copy: whether the caller may change its tensors while the sum is sent.

    >>> add_up([torch.ones(2), torch.ones(2)], "device", counted := Traffic())
    tensor([2., 2.])
    >>> counted
    Traffic(gradients=16, to_host=8, held=8, sent=0)
    """
    first, size = tensors[0].detach(), sum(t.nbytes for t in tensors)
    traffic.gradients += size
    if where == "host":
        traffic.to_host += size
    else:
        traffic.held = max(traffic.held, first.nbytes)
        traffic.to_host += first.nbytes * (where == "device")
    if len(tensors) > 1:
        on = "cpu" if where == "host" else first.device
        total = summed([t.detach().to(on) for t in tensors])
        first, copy = total.to(first.dtype), where == "device" and total.is_cuda
    if where == "stay":
        return first.reshape(-1).clone() if copy else first.reshape(-1)
    alone = first.device.type == "cpu" and first.is_contiguous() and not copy
    return first.view(-1) if alone else fresh(first)


def split_and_load(
    data: Any, devices: Sequence[Any], batch_axis: int = 0, even_split: bool = True
) -> list[Tensor]:
    """A batch in as many slices as there are devices, each on its device.

    Args:
        data: the batch: a tensor, or what ``torch.as_tensor`` makes one of.
        devices: such as ``["cuda:0", "cuda:1"]``; ``cpu`` several times to try it out.
        batch_axis: along which axis.
        even_split: refuse a batch that does not divide.

    Raises:
        KVStoreError: it does not.

    >>> split_and_load([1, 2, 3, 4], ["cpu", "cpu"])
    [tensor([1, 2]), tensor([3, 4])]
    """
    batch, slices = torch.as_tensor(data), len(devices)
    if even_split and batch.shape[batch_axis] % slices:
        raise KVStoreError(
            f"a batch of shape {tuple(batch.shape)} cannot be split evenly into {slices} slices "
            f"along axis {batch_axis}. Use a multiple of {slices}, or even_split=False."
        )
    parts = torch.tensor_split(batch, slices, batch_axis)
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]
