"""The contract of ``torch.distributed`` collectives, and the algorithms' point-to-point calls.

Reference implementations handle only the plain case: a flat, contiguous tensor, one of four
operations, and a rank that belongs to the group. :func:`collective` converts every other case to
the plain one, or raises an error before anything is sent.

Lengths that differ between ranks are not detected in advance, because the check would need a
message that no paper's cost formula includes. In an all-reduce, some rank then receives more than
it expects, which terminates its process under gloo; distkit reports both ends of that message.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from distkit.algorithms.catalog import Reference
from distkit.algorithms.rounds import Hosts, consecutive_hosts

ReduceOp = dist.ReduceOp.RedOpType
Group = dist.ProcessGroup | None
SUM = dist.ReduceOp.SUM

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


#: Arguments that are not tensors.
_SETTINGS = {"src", "dst", "op", "group"}


# -- point-to-point calls of torch.distributed, with group ranks instead of world ranks ----------


def combine(local: Tensor, received: Tensor, op: ReduceOp) -> None:
    """Compute ``local ← local op received``, elementwise."""
    _COMBINE[op](local, received, out=local)


def send(tensor: Tensor, dst: int, group: Group) -> None:
    """Send ``tensor`` to a rank of the group."""
    dist.send(tensor, group=group, group_dst=dst)


def recv(tensor: Tensor, src: int, group: Group) -> Tensor:
    """Receive ``tensor`` from a rank of the group."""
    dist.recv(tensor, group=group, group_src=src)
    return tensor


def isend(tensor: Tensor, dst: int, group: Group) -> dist.Work:
    """Start sending ``tensor`` to a rank of the group."""
    return cast(dist.Work, dist.isend(tensor, group=group, group_dst=dst))


def exchange(out: Tensor, dst: int, into: Tensor, src: int, group: Group) -> Tensor:
    """Send ``out`` to one rank of the group while receiving ``into`` from another."""
    work = isend(out, dst, group)
    recv(into, src, group)
    work.wait()
    return into


# -- the hosts of a group, after one exchange of host names ------------------------------------

_hosts: WeakKeyDictionary[dist.ProcessGroup, Hosts] = WeakKeyDictionary()


def hosts_of(group: Group = None) -> Hosts:
    """Return the group ranks on each host, with hosts ordered by their first rank.

    If the launcher put all ranks on one host, nothing is exchanged. Otherwise, the first call for a
    group is collective: it publishes this rank's host name in the store and waits for the host
    names of the other ranks.

    Args:
        group: the process group; None means the default group.

    Example:
        >>> hosts_of()        # doctest: +SKIP
        [[0, 1], [2, 3, 4]]
    """
    group = group or dist.group.WORLD
    assert group is not None  # the default group exists
    if os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()):
        return [[*range(dist.get_world_size(group))]]
    if group not in _hosts:
        store, names = group.get_group_store(), defaultdict[bytes, list[int]](list)
        store.set(f"distkit/host/{dist.get_rank(group)}", socket.gethostname())
        for rank in range(dist.get_world_size(group)):
            names[store.get(f"distkit/host/{rank}")].append(rank)
        _hosts[group] = list(names.values())
    return _hosts[group]


def host_layout(group: Group, devices_per_host: int | None) -> Hosts:
    """Return the ranks on each host, as specified or detected; [] if one host is detected."""
    if devices_per_host is not None:
        return consecutive_hosts(dist.get_world_size(group), devices_per_host)
    hosts = hosts_of(group)
    return hosts if len(hosts) > 1 else []


#: Single-tensor all-gather and reduce-scatter, which older versions of torch name differently.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# -- the contract ------------------------------------------------------------------------


def collective(
    *, reads: str = "", uneven: bool = False, on_device: bool = False
) -> Callable[[Reference], Reference]:
    """Wrap a reference implementation in the contract of its ``torch.distributed`` counterpart.

    The implementation receives contiguous, flat tensors without gradients. Results are written
    back to the caller's tensors. A rank outside the group gets a warning and does nothing.

    Args:
        reads: the read-only tensor argument, if any. The other tensors are written to.
        uneven: whether the tensors of one call may differ in length.
        on_device: whether the implementation accepts GPU tensors, which gloo cannot send.

    Raises:
        TypeError: An argument is not a dense tensor.
        ValueError: A list or tensor is missing or has the wrong length; tensors differ in number
            of elements, dtype or device; the operation is not one of the four; or a root is outside
            the group.
    """

    def decorate(reference: Reference) -> Reference:
        parameters, name = signature(reference), reference.__name__
        names = [
            p.name
            for p in parameters.parameters.values()
            if p.kind is not p.KEYWORD_ONLY and p.name not in _SETTINGS
        ]
        reduces = [*parameters.parameters][1:3] == ["op", "group"]

        @wraps(reference)
        def call(*args: Any, **kwargs: Any) -> None:
            if reduces and not kwargs and 0 < len(args) < 4 and _is_plain(*args):
                reference(*args)
                return
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            group, root = arguments["group"], arguments.get("src", arguments.get("dst"))
            if dist.get_rank(group) < 0:
                c10d._warn_not_in_group(name)
                return
            if "op" in arguments:
                arguments["op"] = _unwrap_op(name, arguments["op"])
            tensors = {key: arguments[key] for key in names if arguments[key] is not None}
            if root is not None:
                _check_root(name, root, set(names) - tensors.keys(), group)
            _check(name, tensors, group, uneven)
            plain = {key: _plain(value, group, on_device) for key, value in tensors.items()}
            with torch.no_grad():
                reference(**arguments | plain)
                if "dst" not in arguments or root == dist.get_rank():  # ranks with a result
                    for key in tensors.keys() - {reads}:
                        _write_back(as_sequence(tensors[key]), as_sequence(plain[key]))

        return call  # type: ignore[return-value]

    return decorate


def as_sequence(value: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``value`` as a sequence of tensors."""
    return value if isinstance(value, (list, tuple)) else [value]  # type: ignore[list-item]


# -- before the call: validation and conversion ----------------------------------------


def _is_plain(x: Any, op: Any = SUM, group: Group = None) -> bool:
    """Return True if no conversion is needed; this fast path covers most calls."""
    if op is not SUM or type(x) is not Tensor or x.dtype not in (torch.float32, torch.float64):
        return False
    if x.layout != torch.strided or x.dim() != 1 or not x.is_contiguous() or x.requires_grad:
        return False
    return x.device.type == "cpu" and dist.get_rank(group) >= 0


def _unwrap_op(name: str, op: Any) -> ReduceOp:
    op = getattr(op, "op", op)  # unwrap ReduceOp(ReduceOp.SUM)
    if op not in _COMBINE:
        supported = _join(o.name for o in _COMBINE)
        raise ValueError(
            f"{name}: op is {op}; supported operations: {supported} (dist.ReduceOp.SUM, …)."
        )
    return op  # type: ignore[no-any-return]


def _check(name: str, arguments: dict[str, Any], group: Group, uneven: bool) -> None:
    """Validate the arguments before anything is sent."""
    tensors: list[Tensor] = []
    for key, value in arguments.items():
        tensors += (sequence := as_sequence(value))
        if sequence is value and len(value) != (n := dist.get_world_size(group)):
            raise ValueError(
                f"{name}: expected len({key}) == {n}, one tensor per rank; got {len(value)}."
            )
    for t in tensors:
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            found = f"layout {t.layout}" if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name} expects dense tensors; got {found}.")
    properties: dict[str, set[Any]] = {
        "dtype": {t.dtype for t in tensors},
        "device": {t.device for t in tensors},
    }
    if not uneven:
        properties["number of elements"] = {t.numel() for t in tensors}
    for label, values in properties.items():
        if len(values) > 1:
            raise ValueError(f"{name}: tensors differ in {label}: {_join(values)}.")


def _check_root(name: str, root: int, missing: set[str], group: Group) -> None:
    members = dist.get_process_group_ranks(group)
    if root not in members:
        ranks = ", ".join(map(str, members))
        raise ValueError(f"{name}: rank {root} is not in the group, which has ranks {ranks}.")
    if missing and dist.get_rank() == root:
        raise ValueError(f"{name}: rank {root} must pass {', '.join(missing)}.")


def _join(values: Any) -> str:
    return ", ".join(sorted({str(value).removeprefix("torch.") for value in values}))


def _plain(value: Any, group: Group, on_device: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(t, group, on_device) for t in value]
    if not (value.is_cpu or on_device) and dist.get_backend(group) == "gloo":
        # gloo sends from host memory only
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        value = host.copy_(value)
    if value.dim() == 1 and value.is_contiguous() and not value.requires_grad:
        return value
    return value.detach().contiguous().view(-1)


# -- after the call --------------------------------------------------------------------


def _write_back(tensors: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Copy the results into the caller's tensors."""
    for t, result in zip(tensors, plain, strict=True):
        if result.data_ptr() != t.data_ptr():
            t.detach().copy_(result.view(t.shape))
