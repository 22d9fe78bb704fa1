"""The words that pages are written in: messages between the ranks of a group.

``torch.distributed``'s own, with the ranks of the group in the place of the world's.
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import Tensor

from distkit.algorithms.contract import Group


def send(out: Tensor, to: int, group: Group) -> None:
    """Send ``out`` to a rank of the group."""
    dist.send(out, group=group, group_dst=to)


def recv(into: Tensor, source: int, group: Group) -> Tensor:
    """Receive ``into`` from a rank of the group."""
    dist.recv(into, group=group, group_src=source)
    return into


def isend(out: Tensor, to: int, group: Group) -> dist.Work:
    """Begin to send ``out`` to a rank of the group."""
    return cast(dist.Work, dist.isend(out, group=group, group_dst=to))


def irecv(into: Tensor, source: int, group: Group) -> dist.Work:
    """Begin to receive ``into`` from a rank of the group."""
    return cast(dist.Work, dist.irecv(into, group=group, group_src=source))


def exchange(out: Tensor, to: int, into: Tensor, source: int, group: Group) -> Tensor:
    """Send ``out`` to one rank of the group while receiving ``into`` from another."""
    sending = isend(out, to, group)
    recv(into, source, group)
    sending.wait()
    return into
