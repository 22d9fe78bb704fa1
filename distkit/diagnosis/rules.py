"""Rules for the kinds of mistakes that a diagnosis finds, and remedies for torch's errors.

The rules are read from ``rules.md``. To add a kind of mistake, add a section to that file and
return ``rules.NAME.finding(…)`` where the mistake is detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distkit.diagnosis.findings import Finding, fill, lines_of
from distkit.events import Span

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
    r"StopIteration": "An iterator ran out of items. If it yields batches, use the same number of "
    "batches on every rank.",
    r"process group has not been initialized|world group map": "Make the call after "
    "init_process_group, and before destroy_process_group.",
    r"process group specified": "This rank is not a member of the group, or the group was "
    "destroyed: make the call only on members, before destroy_process_group.",
    r"is not part of group": "src and dst are global ranks, even in a group: to pass a rank within "
    "the group, use group_src or group_dst.",
    r"is not registered, please create group": "This rank is not a member of the group: "
    "make the call only on members of the group, or add this rank to the list passed to "
    "new_group.",
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
        "The tensor for all ranks must have (group size) times as many elements as one rank's "
        "tensor."
    ),
    r"in->size == out->size": "Without split sizes, the input and output of all_to_all_single must "
    "have the same size; otherwise, pass output_split_sizes and input_split_sizes.",
    r"[Ss]plit.* match": "input_split_sizes must sum to the number of rows of the input, and "
    "output_split_sizes to the number of rows of the output.",
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
        return (
            "batch_isend_irecv needs at least one P2POp: skip the call on a rank that has nothing "
            "to exchange."
        )
    return next((remedy for pattern, remedy in _ADVICE.items() if re.search(pattern, text)), "")


#: Codes of the rules about matched calls that differ.
MISMATCHES = frozenset("DK201 DK202 DK203 DK204 DK205 DK206 DK306".split())

#: Remedies for a process that has exited, by text in the cause.
ENDINGS = {
    "dk.inject_faults": "To run without the fault, run it outside the dk.inject_faults block.",
    "gloo": "It received more data than its tensor holds: compare the shapes, dtypes and splits "
    "that the ranks pass to this call, and the order of their calls.",
    "SIGKILL": "If memory ran out, use smaller batches or fewer ranks. Otherwise find the call or "
    "the command that sent the signal, such as os.kill.",
    "SIGSEGV": "It crashed in native code: check the arguments of its last call.",
    "exit status": "Look for a call to os._exit, including in libraries, and raise an exception "
    "instead.",
}

#: Matches the heading of a section: its code, its name, and the section that it extends.
_HEADING = re.compile(r"^##? (DK\d{3})? ?(\w+)(?: \((\w+)\))?\n+", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Rule:
    """A kind of mistake, with its code, name, page, and the templates of its sentences."""

    code: str
    name: str
    page: str
    message: str
    remedy: str
    #: The templates of all sentences, by name.
    sentences: Mapping[str, str]

    @property
    def desynchronizes(self) -> bool:
        """Whether later collectives of the ranks no longer match."""
        return "desynchronizes" in self.sentences

    def title(self) -> str:
        """Return the first line of the page."""
        return self.page.partition("\n")[0]

    def fill(self, name: str, **values: object) -> str:
        """Fill the template of one of the rule's sentences."""
        return fill(self.sentences[name], **values)

    def finding(
        self,
        *spans: Span,
        message: str = "",
        remedy: str = "",
        culprits: Iterable[int] = (),
        waiting: Iterable[int] = (),
        missing: Iterable[int] = (),
        lines: Mapping[int, str] | None = None,
        **values: object,
    ) -> Finding:
        """Return a finding of this kind.

        Args:
            spans: the operations whose lines the finding names.
            message: a template that replaces the rule's message.
            remedy: a sentence that replaces the rule's remedy.
            culprits: see :class:`Finding`.
            waiting: see :class:`Finding`.
            missing: see :class:`Finding`.
            lines: the line of each rank, instead of the lines of ``spans``.
            values: values for the placeholders of the rule's templates.
        """
        return Finding(
            self,
            fill(message or self.message, **values),
            remedy or fill(self.remedy, **values),
            tuple(culprits),
            tuple(waiting),
            tuple(missing),
            dict(lines_of(*spans) if lines is None else lines),
        )


def _read(text: str) -> dict[str, Rule]:
    """Return the rules in the text of ``rules.md``, by name."""
    rules: dict[str, Rule] = {}
    _, *parts = _HEADING.split(text)
    for code, name, base_name, body in zip(*[iter(parts)] * 4, strict=True):
        templates, _, page = body.strip().partition("\n\n")
        lines = (line[2:].partition(": ") for line in templates.splitlines())
        sentences = {key: value.strip('"') for key, _, value in lines}
        base = rules.get(base_name, Rule("", "", "", "", "", {}))
        sentences = {"message": "", "remedy": "", **base.sentences, **sentences}
        rules[name] = Rule(
            code or base.code,
            name if code else base.name or name,
            page or base.page,
            sentences["message"],
            sentences["remedy"],
            sentences,
        )
    return rules


_BY_NAME = _read(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))

#: Every kind of mistake, by its code.
RULES = {rule.code: rule for name, rule in _BY_NAME.items() if rule.code and rule.name == name}


def __getattr__(name: str) -> Rule:
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise AttributeError(f"no rule {name!r}")
