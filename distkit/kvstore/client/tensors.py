"""Prepares a worker's tensors for sending, as flat copies in host memory.

The gradients of a worker's devices are summed. Without ``device`` in the store's name, each
device's gradient is copied to host memory, and the sum is computed there. With ``device``, the sum
is computed on the first device and copied, which needs fewer copies to host memory but more device
memory. Source: MXNet's ``device`` and ``dist_sync_device``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.optimizer import sum_tensors
from distkit.kvstore.protocol.placement import DTYPES, Part, dtype_name

#: One key or several.
Keys: TypeAlias = "Key | Sequence[Key]"
#: One tensor per key, or one per key and device.
Values: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[Tensor | Sequence[Tensor]]"


def group_by_key(action: str, key: Keys, value: Values) -> dict[Key, list[Tensor]]:
    """Return the tensors of each key; a repeated key has the tensors of all its values.

    Raises:
        KVStoreError: The arguments are not keys and tensors, or their numbers differ.
    """
    keys: list[Any] = key_list(key)
    values: list[Any] = list(value) if isinstance(key, (list, tuple)) else [value]
    if len(keys) != len(values):
        raise KVStoreError(
            f"{action}: the numbers of keys ({len(keys)}) and values ({len(values)}) differ. Pass "
            "one tensor per key, or one list of tensors (one per device) per key."
        )
    tensors: dict[Key, list[Tensor]] = {k: [] for k in keys}
    for k, v in zip(keys, values, strict=True):
        tensors[k] += _tensors(action, k, v)
    return tensors


def key_list(key: Keys) -> list[Key]:
    """Return the keys as a list.

    Raises:
        KVStoreError: A key is neither an integer nor a string.
    """
    keys: list[Any] = list(key) if isinstance(key, (list, tuple)) else [key]
    for k in keys:
        if type(k) not in (int, str):
            raise KVStoreError(f"{k!r} is not a key. Use an int or a str, or a list of them.")
    return keys


def _tensors(action: str, key: Key, value: Any) -> list[Tensor]:
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    for t in tensors or [None]:
        if not isinstance(t, Tensor):
            got = type(t).__name__ if tensors else "no tensor"
            raise KVStoreError(
                f"{action} of {key!r} got {got}. Pass a tensor (torch.as_tensor(x) converts a "
                "number, a list or an array; a gradient is None before backward()), or a list of "
                "tensors, one for each device."
            )
        if t.layout is not torch.strided:
            raise KVStoreError(
                f"{action} of {key!r} got a sparse tensor, which servers do not accept. Pass "
                "tensor.to_dense(), or make gradients dense with Embedding(..., sparse=False)."
            )
        if dtype_name(t) not in DTYPES:
            raise KVStoreError(
                f"{action} of {key!r} got {t.dtype}, which cannot be summed. "
                f"Use one of {', '.join(DTYPES)}."
            )
    return tensors


def host_copy(tensor: Tensor) -> Tensor:
    """Return a flat copy in host memory, so that the caller may change its tensor."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).view(-1)


def concatenate(values: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Concatenate the parts of an array."""
    # also copies a single part, because its memory may be read-only
    return torch.cat(list(values)).view(shape)


def write(out: Tensor, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
    """Write the parts of an array to a tensor on any device."""
    out = out.detach()
    if not out.is_contiguous():
        out.copy_(concatenate(values, tuple(out.shape)))
        return
    flat = out.view(-1)
    for part, value in zip(parts, values, strict=True):
        slice_part(flat, part).copy_(value)


def slice_part(flat: Tensor, part: Part) -> Tensor:
    """Return a part of an array, usually the whole array."""
    return flat if part.stop - part.start == flat.numel() else flat[part.start : part.stop]


@dataclass
class Traffic:
    """Traffic of a worker's pushes so far [bytes].

    ``gradients`` is the size of all devices' gradients, ``to_host`` the amount copied from device
    to host memory, ``sent`` the amount sent to servers; ``held`` is the peak device memory used
    for a sum.
    """

    gradients: int = 0
    to_host: int = 0
    held: int = 0
    sent: int = 0


def sum_devices(
    tensors: Sequence[Tensor], where: str, traffic: Traffic, *, copy: bool = True
) -> Tensor:
    """Return the flat sum of a worker's tensors for one key.

    Args:
        tensors: one per device.
        where: "host": copy all to the host and add there. "device": add on the first device, and
            copy the sum to the host.
        traffic: counts the bytes.
        copy: whether the caller may change its tensors while the sum is sent.

    >>> sum_devices([torch.ones(2), torch.ones(2)], "device", counted := Traffic())
    tensor([2., 2.])
    >>> counted
    Traffic(gradients=16, to_host=8, held=8, sent=0)
    """
    tensor, size = tensors[0].detach(), sum(t.nbytes for t in tensors)
    traffic.gradients += size
    if where == "host":
        traffic.to_host += size
    else:
        traffic.held = max(traffic.held, tensor.nbytes)
        traffic.to_host += tensor.nbytes
    if len(tensors) > 1:
        device = "cpu" if where == "host" else tensor.device
        total = sum_tensors([t.detach().to(device) for t in tensors])
        tensor, copy = total.to(tensor.dtype), where == "device" and total.is_cuda
    is_shareable = tensor.device.type == "cpu" and tensor.is_contiguous() and not copy
    return tensor.view(-1) if is_shareable else host_copy(tensor)


def split_and_load(
    data: Any, devices: Sequence[Any], batch_axis: int = 0, even_split: bool = True
) -> list[Tensor]:
    """Split a batch into one slice per device and copy each slice to its device.

    Args:
        data: the batch, a tensor or an argument of ``torch.as_tensor``.
        devices: for example ``["cuda:0", "cuda:1"]``; repeat ``"cpu"`` to run without GPUs.
        batch_axis: the axis to split.
        even_split: whether to reject a batch that cannot be divided evenly.

    Raises:
        KVStoreError: The batch cannot be divided evenly.

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
