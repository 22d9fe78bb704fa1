"""One gradient from the gradients of a worker's devices, and what it costs to get it.

Without ``device`` in a store's name each device's gradient is copied to host memory and added
there; with it they are added on the first of the devices, and one sum is copied: fewer copies, more
device memory. Source: MXNet's ``device`` and ``dist_sync_device``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distkit.errors import KVStoreError
from distkit.kvstore.client.tensors import NARROW, fresh, unchanged

if TYPE_CHECKING:
    from torch import Tensor


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
        copy: whether the caller may change its tensors while the sum is on its way.

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
    return fresh([total])


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
