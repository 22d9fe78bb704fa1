"""Tensors as the worker hands them over: flat, in host memory, nobody else's.

One gradient is made from those of a worker's devices. Without ``device`` in a store's name each
device's gradient is copied to host memory and added there; with it they are added on the first of
the devices, and one sum is copied: fewer copies, more device memory. Sums of several keys leave a
GPU on a stream of their own: while one is sent, the next is added up and copied. Source: MXNet's
``device`` and ``dist_sync_device``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.placement import DTYPES, NARROW, Part, dtype_name
from distkit.kvstore.transport.memory import LARGE, empty, pinned

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
        KVStoreError: one is neither a number of at most 64 bits nor a string.
    """
    keys: list[Any] = list(key) if isinstance(key, (list, tuple)) else [key]
    for k in keys:
        if type(k) not in (int, str):
            raise KVStoreError(f"{k!r} is not a key. Use an int or a str, or a list of them.")
        if type(k) is int and not -(2**63) <= k < 2**63:
            raise KVStoreError(f"key {k} has more than 64 bits. Use a smaller number, or str(key).")
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

    def __str__(self) -> str:
        saved = self.gradients - self.to_host
        return (
            f"bytes: {self.gradients:,} of gradients, {self.to_host:,} to the host "
            f"({saved:,} saved), {self.held:,} on the device, {self.sent:,} sent"
        )


class Copies:
    """Copies of sums to the host; from a GPU they run on a stream of their own.

    >>> copies = Copies()
    >>> [copies.wait(host) for host in ahead(map(copies.start, [torch.ones(1, 2)]))]
    [tensor([1., 1.])]
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._ends: dict[int, Any] = {}  # of copies on their way: by address

    def start(self, total: Tensor) -> Tensor:
        """A flat copy, to be waited for."""
        if not total.is_cuda:
            return fresh([total])
        device = total.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        host = pinned(total.numel(), total.dtype)
        with torch.cuda.stream(side):
            host.copy_(total.reshape(-1), non_blocking=True)
        total.record_stream(side)
        self._ends[host.data_ptr()] = side.record_event()
        return host

    def wait(self, host: Any) -> Any:
        """The same once it has arrived; what is no such copy is there already."""
        if self._ends and isinstance(host, Tensor):
            if (end := self._ends.pop(host.data_ptr(), None)) is not None:
                end.synchronize()
        return host


def ahead(items: Iterable[Any]) -> Iterator[Any]:
    """The same items, each made before the one in front of it is used."""
    waiting: list[Any] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def add_up(
    tensors: Sequence[Tensor],
    where: str,
    traffic: Traffic,
    *,
    copy: bool = True,
    copies: Copies | None = None,
) -> Tensor:
    """The sum of a worker's tensors of one key: flat.

    Args:
        tensors: one for each device.
        where: "host": copied there, added there. "device": added on the first device, the sum
            copied to the host. "stay": added on the first device, where the sum stays.
        traffic: counts the bytes.
        copy: whether the caller may change its tensors while the sum is on its way.
        copies: what copies a sum from the device, and has to be asked whether it is there.

    >>> import torch
    >>> add_up([torch.ones(2), torch.ones(2)], "device", counted := Traffic())
    tensor([2., 2.])
    >>> counted
    Traffic(gradients=16, to_host=8, held=8, sent=0)
    """
    size = sum(t.nbytes for t in tensors)
    traffic.gradients += size
    if where == "host":
        traffic.to_host += size
        return fresh(tensors) if copy else unchanged(tensors)
    first, *rest = (t.detach() for t in tensors)
    traffic.held = max(traffic.held, first.nbytes)
    if rest and first.dtype in NARROW:
        total = sum((t.to(first.device).float() for t in rest), first.float()).to(first.dtype)
    else:
        total = first.contiguous() if not rest else first + rest[0].to(first.device)
        for t in rest[1:]:
            total += t.to(first.device)
    if where == "stay":
        return total.reshape(-1).clone() if not rest else total.reshape(-1)
    traffic.to_host += first.nbytes
    return copies.start(total) if copies else fresh([total])


def split_data(
    data: Tensor, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[Tensor]:
    """A batch in slices, the first ones larger by one if it does not divide.

    Args:
        data: the batch.
        num_slice: how many slices.
        batch_axis: along which axis.
        even_split: refuse a batch that does not divide.

    Raises:
        KVStoreError: it does not, or is smaller than the number of slices.

    >>> [len(part) for part in split_data(torch.ones(5, 2), 3, even_split=False)]
    [2, 2, 1]
    """
    size = data.shape[batch_axis]
    if even_split and size % num_slice:
        raise KVStoreError(
            f"a batch of shape {tuple(data.shape)} cannot be split evenly into {num_slice} slices "
            f"along axis {batch_axis}. Use a multiple of {num_slice}, or even_split=False."
        )
    return list(torch.tensor_split(data, num_slice, batch_axis))


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
    parts = split_data(torch.as_tensor(data), len(devices), batch_axis, even_split)
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]
