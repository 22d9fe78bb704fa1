"""Remedies for torch's errors. No side effects."""

from __future__ import annotations

import re

OWN_PROCESSES = (
    "The program starts its own processes on every rank. They do not belong to the ranks' process "
    "group, and nothing they do is recorded. Run their function with cluster.run(fn, ...) instead: "
    "it calls fn on every rank, and fn can call dist.get_rank() and dist.get_world_size()."
)

#: Remedies, by a pattern that matches the error's text.
_ADVICE = {
    r"^SystemExit: [^\n]*$": "Return from the function instead.",
    r"^KeyboardInterrupt: signal SIGINT$": "The signal came from outside distkit. "
    "cluster.interrupt() ends a run on all ranks.",
    r"^(ProcessRaisedException|ProcessExitedException|ChildFailedError|CalledProcessError: .*\b"
    r"(torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed|mpirun)\b)": OWN_PROCESSES,
    r"StopIteration": "An iterator ran out of items: use the same number of batches on every rank.",
    r"process group (specified|has not been initialized)|world group map": "Make the call after "
    "init_process_group, and before destroy_process_group.",
    r"is not part of group": "src and dst are global ranks, even in a group: to pass a rank within "
    "the group, use group_src or group_dst.",
    r"is not registered, please create group": "This rank is not a member of the group: "
    "make the call only on members of the group, or add the rank to new_group.",
    r"incompatible function arguments[\s\S]*ReduceOp": "op must be a dist.ReduceOp: "
    "dist.ReduceOp.SUM (the default), AVG, MAX, MIN, PRODUCT, BAND, BOR or BXOR.",
    r"invalid root rank": "src and dst must be ranks from 0 to dist.get_world_size() - 1.",
    r"rank -?\d+ does not exist": "Ranks are 0 to dist.get_world_size() - 1: the last rank "
    "of a chain must skip the call; in a ring the next rank is (rank + 1) % dist.get_world_size().",
    r"should not be the same as the rank of the current process": "A rank cannot send to "
    "itself: copy the tensor instead.",
    r"Tag must be nonnegative": "Use the same tag, 0 or greater, for the send and its receive.",
    r"Invalid ``op``\. Expected ``op``": "Pass dist.isend or dist.irecv to "
    "P2POp, without calling it.",
    r"Invalid ``p2p_op_list``": "Pass a list of dist.P2POp to batch_isend_irecv.",
    r"invalid output tensor list .*expected length": "Pass one tensor for each rank of the "
    "group: [torch.empty_like(x) for _ in range(dist.get_world_size(group))].",
    r"invalid input tensor list": "Pass one tensor for each rank of the group.",
    r"invalid tensor size at index|tensor size must be equal|tensor must be .* times": (
        "The tensor for all ranks must have as many elements as one rank's tensor times the "
        "group size."
    ),
    r"in->size == out->size": "Without split sizes, the input and output of all_to_all_single must "
    "have the same size; otherwise, pass output_split_sizes and input_split_sizes.",
    r"[Ss]plit.* match": "input_split_sizes must sum to the number of rows of the input, and "
    "output_split_sizes to the rows of the output.",
    r"Cannot use ReduceOp\.(BAND|BOR|BXOR) with non-integral": "Bitwise reductions need integers: "
    "x.to(torch.int64).",
    r"Cannot use ReduceOp\.AVG|ReduceOp\.AVG .*not": "gloo does not support AVG: reduce with SUM, "
    "and divide by dist.get_world_size().",
    r"(gather|scatter)_list`` must be specified": "This rank is the root: pass a list with "
    "one tensor for each rank of the group.",
    r"(gather|scatter)_list`` must NOT be specified": "Pass the list only on the root, and None on "
    "the others: `[…] if rank == root else None`.",
    r"Expected parameter .* of type .*Tensor": "Collectives require tensors: convert numbers with "
    "torch.tensor(x); for other objects, use all_gather_object or broadcast_object_list.",
    r"(must|to) be contiguous|non-contiguous": "Pass x.contiguous().",
    r"leaf Variable that requires grad": "A collective writes into its tensor: pass x.detach(), or "
    "x.grad.",
    r"connectFullMesh failed": "The rank could not connect to another rank. If torchrun has "
    "restarted the ranks, they may have read their predecessors' addresses (pytorch#135712): set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Otherwise, check GLOO_SOCKET_IFNAME.",
    r"DDP expects same model across all ranks": "Build the same model on every rank, with the same "
    "parameters and the same requires_grad.",
}

_EMPTY_BATCH = (
    "batch_isend_irecv needs at least one P2POp: skip the call on a rank that has nothing to "
    "exchange."
)


_MAX_CHARS = 200  # maximum length of an exception's first line

#: Matches torch's error for an ``op`` that is not a ReduceOp.
_WRONG_OP = re.compile(r"incompatible function arguments[\s\S]*ReduceOp[\s\S]*, (.+)$")


def headline(text: str, line: str = "") -> str:
    """Return the first line of an exception, reworded where torch's text is unclear.

    Args:
        text: the exception's class name and message.
        line: the source text of the user's line that raised it.

    >>> headline("IndexError: list index out of range", "dist.batch_isend_irecv(ops)")
    'IndexError: batch_isend_irecv got an empty list'
    """
    if _is_empty_batch(text, line):
        return "IndexError: batch_isend_irecv got an empty list"
    if (match := _WRONG_OP.search(text)) is not None:
        return f"TypeError: op is {match[1]}, not a dist.ReduceOp"
    first = (text.splitlines() or ["an exception"])[0].removesuffix(": ")
    return (
        first
        if len(first) <= _MAX_CHARS
        else re.sub(r" \S{0,20}$", " ", first[: _MAX_CHARS - 1]) + "…"
    )


def _is_empty_batch(text: str, line: str) -> bool:
    return text.startswith("IndexError: list index") and "batch_isend_irecv" in line


def advice(text: str, line: str = "") -> str:
    """Return the remedy for an exception; "" if none is known.

    Args:
        text: the exception's class name and message.
        line: the source text of the user's line that raised it.

    >>> advice("RuntimeError: Tag must be nonnegative")
    'Use the same tag, 0 or greater, for the send and its receive.'
    """
    if _is_empty_batch(text, line):
        return _EMPTY_BATCH
    return next((remedy for pattern, remedy in _ADVICE.items() if re.search(pattern, text)), "")
