"""Remedies for torch's errors. Pure."""

from __future__ import annotations

import re

OWN_PROCESSES = (
    "The program starts its own processes on every rank. They do not belong to the ranks' process "
    "group, and nothing they do is recorded. Run their function instead: cluster.run(fn, ...) "
    "calls fn on every rank, and fn asks dist.get_rank() and dist.get_world_size()."
)

#: Remedies by pattern of the error's text.
_ADVICE = {
    r"^SystemExit: [^\n]*$": "Return instead.",
    r"^KeyboardInterrupt: signal SIGINT$": "The signal came from outside distkit. "
    "cluster.interrupt() ends a run on all ranks.",
    r"^(ProcessRaisedException|ProcessExitedException|ChildFailedError|CalledProcessError: .*\b"
    r"(torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed|mpirun)\b)": OWN_PROCESSES,
    r"StopIteration": "Its iterator had no more items: give every rank the same number of batches.",
    r"process group (specified|has not been initialized)|world group map": "Make the call after "
    "init_process_group, and before destroy_process_group.",
    r"is not part of group": "In a group, src and dst are ranks of the whole world; a rank of the "
    "group is passed as group_src or group_dst.",
    r"is not registered, please create group": "This rank is not a member of the group: make "
    "the call on the group's members only, or add the rank to new_group.",
    r"incompatible function arguments[\s\S]*ReduceOp": "op is a dist.ReduceOp: dist.ReduceOp.SUM, "
    "which is the default, or AVG, MAX, MIN, PRODUCT, BAND, BOR, BXOR.",
    r"invalid root rank": "src and dst are ranks that exist: 0 to dist.get_world_size() - 1.",
    r"rank -?\d+ does not exist": "In a ring the next rank is (rank + 1) % dist.get_world_size().",
    r"should not be the same as the rank of the current process": "A rank sends to other ranks "
    "only: copy the tensor instead.",
    r"Tag must be nonnegative": "Give the send and its receive the same tag, 0 or more.",
    r"Invalid ``op``\. Expected ``op``": "Give P2POp dist.isend or dist.irecv, without calling it.",
    r"Invalid ``p2p_op_list``": "Give batch_isend_irecv a list of dist.P2POp.",
    r"invalid output tensor list .*expected length": "Give it one tensor for each rank of the "
    "group: [torch.empty_like(x) for _ in range(dist.get_world_size(group))].",
    r"invalid input tensor list": "Give it one tensor for each rank of the group.",
    r"invalid tensor size at index|tensor size must be equal|tensor must be .* times": (
        "The tensor that gathers from all ranks, or scatters to all, must have as many elements "
        "as the tensor of one rank times the group's size."
    ),
    r"in->size == out->size": "Without splits, the output of all_to_all_single has as many "
    "elements as its input: pass output_split_sizes and input_split_sizes otherwise.",
    r"[Ss]plit.* match": "input_split_sizes add up to the rows of the input, output_split_sizes to "
    "those of the output.",
    r"Cannot use ReduceOp\.(BAND|BOR|BXOR) with non-integral": "Bitwise reductions take integers: "
    "x.to(torch.int64).",
    r"Cannot use ReduceOp\.AVG|ReduceOp\.AVG .*not": "gloo does not average: reduce by SUM, and "
    "divide by dist.get_world_size().",
    r"(gather|scatter)_list`` must be specified": "Pass the list on this rank, the root: one "
    "tensor for each rank of the group.",
    r"(gather|scatter)_list`` must NOT be specified": "Pass the list on the root only, and None on "
    "the others: `[…] if rank == root else None`.",
    r"Expected parameter .* of type .*Tensor": "Collectives take tensors: torch.tensor(x) makes "
    "one of a number; all_gather_object and broadcast_object_list take objects.",
    r"(must|to) be contiguous|non-contiguous": "x.contiguous() makes a tensor contiguous.",
    r"leaf Variable that requires grad": "A collective writes into its tensor: pass x.detach(), or "
    "x.grad.",
    r"connectFullMesh failed": "It could not connect to another rank's address. If torchrun has "
    "started the ranks anew, they may have read the addresses of those before them "
    "(pytorch#135712): set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. If not, check GLOO_SOCKET_IFNAME.",
    r"DDP expects same model across all ranks": "Build the same model on every rank, with the same "
    "parameters and the same requires_grad.",
}

_EMPTY_BATCH = (
    "batch_isend_irecv takes at least one P2POp: leave the call out on a rank that has nothing to "
    "exchange."
)


_MAX_CHARS = 200  # characters of an exception's first line that are shown

#: Torch's error if ``op`` is not a ReduceOp.
_WRONG_OP = re.compile(r"incompatible function arguments[\s\S]*ReduceOp[\s\S]*, (.+)$")


def headline(text: str, line: str = "") -> str:
    """Return the first line of an exception, reworded if torch's is unclear.

    Args:
        text: the name of its class and its message.
        line: the text of the user's line that raised it.

    >>> headline("IndexError: list index out of range", "dist.batch_isend_irecv(ops)")
    'IndexError: batch_isend_irecv got an empty list'
    """
    if _is_empty_batch(text, line):
        return "IndexError: batch_isend_irecv got an empty list"
    if (given := _WRONG_OP.search(text)) is not None:
        return f"TypeError: op is {given[1]}, not a dist.ReduceOp"
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
        text: the name of its class and its message.
        line: the text of the user's line that raised it.

    >>> advice("RuntimeError: Tag must be nonnegative")
    'Give the send and its receive the same tag, 0 or more.'
    """
    if _is_empty_batch(text, line):
        return _EMPTY_BATCH
    return next((remedy for pattern, remedy in _ADVICE.items() if re.search(pattern, text)), "")
