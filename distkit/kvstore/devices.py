"""One gradient from the gradients of a worker's devices, and what it costs to get it.

Without ``device`` in a store's name each device's gradient is copied to host memory and added
there; with it they are added on the first of the devices, and one sum is copied: fewer copies, more
device memory. Source: MXNet's ``device`` and ``dist_sync_device``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkit.kvstore.tensors import fresh, unchanged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Traffic:
    """What a worker's pushes came to so far, in bytes.

    ``gradients``: of all its devices; ``to_host``: copied from a device's memory to the host's;
    ``held``: the most device memory that a sum took; ``sent``: that left for the servers.
    """

    gradients: int = 0
    to_host: int = 0
    held: int = 0
    sent: int = 0


def add_up(
    tensors: Sequence[Tensor], where: str, traffic: Traffic, *, copy: bool = True
) -> Tensor:
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
    total = first.contiguous() if not rest else first + rest[0].to(first.device)
    for t in rest[1:]:
        total += t.to(first.device)
    if where == "stay":
        return total.reshape(-1).clone() if not rest else total.reshape(-1)
    traffic.to_host += first.nbytes
    return fresh([total])
