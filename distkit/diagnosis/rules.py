"""Findings, the rules that define them, their sentences, and remedies for torch's errors.

The rules are read from ``rules.md``. To add a kind of mistake, add a section to that file and
return ``rules.NAME.finding(…)`` where the mistake is detected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Formatter
from typing import Any

from distkit._format import count, named, ordinal, times
from distkit.events import CallRecord, Span
from distkit.trace.calls import at, call
from distkit.trace.log import grouped

#: Folder with the rules' pages, relative to a notebook of this repository.
PAGES = "../docs/findings"


@dataclass(frozen=True, repr=False)
class Finding:
    """A problem in a run, with its cause, the lines involved and the remedy.

    Args:
        rule: the kind of mistake.
        message: the problem and its lines.
        remedy: the action that fixes the problem.
        culprits: the ranks whose lines to check first.
        waiting: the ranks that are stuck because of the problem.
        missing_ranks: the ranks that the waiting ranks wait for.
        lines: the line of each rank involved.
        hang: whether the problem makes a rank hang.
        victims: the ranks that raised or died because of the problem.
    """

    rule: Rule
    message: str
    remedy: str
    culprits: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    lines: dict[int, str] = field(default_factory=dict)
    hang: bool = False
    victims: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The rule's name, such as ``"wrong_tag"``."""
        return self.rule.name

    @property
    def code(self) -> str:
        """The rule's code, such as ``"DK303"``: ``distkit explain DK303`` prints its page."""
        return self.rule.code

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip() + f" [{self.code}]"

    def __repr__(self) -> str:
        return f"<{self.kind}: {self}>"


def linked(text: str) -> str:
    """Return text as HTML, with a link from each code to its page.

    >>> linked("rank 0 < rank 1 [DK303]")
    'rank 0 &lt; rank 1 [<a href="../docs/findings/DK303.md">DK303</a>]'
    """
    page = rf'[<a href="{PAGES}/\1.md">\1</a>]'
    return re.sub(r"\[(DK\d{3})\]", page, escape(text, quote=False))


# -- rules -----------------------------------------------------------------------------

#: Codes of the rules about matched calls that differ.
MISMATCHES = frozenset("DK201 DK202 DK203 DK204 DK205 DK206 DK306".split())

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
        """Whether the ranks' later collectives no longer match."""
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
            spans: the operations whose lines the finding contains.
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
    _, *fields = _HEADING.split(text)
    for code, name, base_name, body in zip(*[iter(fields)] * 4, strict=True):
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


# -- sentences ----------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """Operations in a sentence, with the function that formats each of them."""

    spans: Iterable[Span]
    write: Callable[[Span], str] = call


class _Sentence(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        match value:
            case Span():
                return clauses([value], spec) if spec else call(value) + location(value)
            case Calls():
                return clauses(value.spans, spec, value.write)
            case list() | tuple():
                return verb(value, spec) if spec else named(value)
            case int() if spec == "th":
                return ordinal(value)
            case int() if spec:
                return times(value) if spec == "time" else count(value, spec)
            case str() if spec == "at":
                return at(value)
        return format(value, spec)


def fill(template: str, **values: object) -> str:
    """Fill a sentence template.

    ``{send}`` becomes a call with its line. ``{send:wait in}`` becomes a clause about its rank, or
    about all ranks of :class:`Calls`. ``{send:wait in|a backward pass}`` replaces the call's name.
    ``{ranks}`` becomes a list of ranks, and ``{ranks:have}`` a list of ranks with a verb. The
    template contains the verb in the plural; it is changed to the singular for a single rank.
    ``{n:th}`` becomes an ordinal, ``{n:message}`` a count, and ``{where:at}`` a line.

    >>> fill("{ranks:have} sent {n:message}{where:at}.", ranks=[0, 2], n=1, where="a.py:3")
    'ranks 0 and 2 have sent 1 message at a.py:3.'
    """
    return _Sentence().format(template, **values)


_MAX_CLAUSES = 5  # maximum number of clauses in a sentence


def verb(ranks: Iterable[int], plural: str) -> str:
    """Return ranks with a verb that agrees in number.

    >>> verb([1], "wait"), verb([0, 2], "wait")
    ('rank 1 waits', 'ranks 0 and 2 wait')
    """
    ordered = sorted(ranks)
    irregular = {
        "have": "has",
        "go": "goes",
        "were": "was",
        "are": "is",
        "do": "does",
        "never": "never",
    }
    singular = irregular.get(plural, plural + "s")
    return f"{named(ordered)} {plural if len(ordered) > 1 else singular}"


def tensor(span: CallRecord) -> str:
    """Return the dtype and shape, such as "float32[10, 3]"; "" if the call has no tensor."""
    return f"{span.dtype}{list(span.shape)}" if span.dtype else ""


def with_tensor(span: CallRecord) -> str:
    """Return a call with its tensor, such as "all_reduce() of float32[3]"."""
    return f"{call(span)} of {tensor(span)}" if span.dtype else call(span)


def clauses(spans: Iterable[Span], spec: str, write: Callable[[Span], str] = call) -> str:
    """Return clauses that name ranks, calls and lines, one clause for each call and line.

    Args:
        spans: the operations.
        spec: the verb in the plural, such as ``"wait in"``. Text after ``"|"`` replaces the call.
        write: formats a call.
    """
    phrase, _, replacement = spec.partition("|")
    in_order = sorted(spans, key=lambda s: s.rank)
    by_call = grouped(in_order, lambda s: (replacement or write(s)) + location(s))
    plural, _, preposition = phrase.partition(" ")
    phrases = [
        f"{verb({s.rank for s in group}, plural)} {preposition} {text}".replace("  ", " ")
        for text, group in by_call.items()
    ]
    return listed(phrases)


def location(span: Span) -> str:
    """Return a phrase with the line of a call, and the line of its ``wait()`` if different.

    >>> from distkit.events import Event, Op, State
    >>> line = {"waits_at": "a.py:6"}
    >>> sent = Event(0, 0, Op.SEND, State.BLOCKED, 0.0, peer=1, where="a.py:4", attributes=line)
    >>> from distkit.trace.log import EventLog
    >>> location(EventLog([sent]).spans[0])
    ' at a.py:4 (wait() at a.py:6)'
    """
    waits = span.attributes.get("waits_at", span.where)
    return at(span.where) + (f" (wait() at {waits})" if waits != span.where else "")


def listed(phrases: list[str]) -> str:
    """Join clauses and abbreviate a long list."""
    if len(phrases) > _MAX_CLAUSES:
        phrases = [*phrases[:3], "…", f"{phrases[-1]} ({len(phrases)} in all)"]
    return ", ".join(phrases)


def lines_of(*spans: Span) -> dict[int, str]:
    """Return the line of each rank, if known."""
    return {s.rank: s.where for s in sorted(spans, key=lambda s: s.rank) if s.where}


# -- torch's errors, and processes that exit ----------------------------------------------

#: Remedies, by a pattern that matches the error's text.
_ADVICE = {
    r"^SystemExit: [^\n]*$": "Return from the function instead.",
    r"^KeyboardInterrupt: signal SIGINT$": "The signal came from outside distkit. "
    "cluster.interrupt() ends a run on all ranks.",
    r"^(ProcessRaisedException|ProcessExitedException|ChildFailedError|CalledProcessError: .*\b"
    r"(torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed|mpirun)\b)": (
        "The program starts its own processes on every rank. They do not belong to the ranks' "
        "process group, and nothing they do is recorded. Run their function with cluster.run(fn, "
        "...) instead: it calls fn on every rank, and fn can call dist.get_rank() and "
        "dist.get_world_size()."
    ),
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


#: Remedies for a process that has exited, keyed by text that the cause contains.
ENDINGS = {
    "dk.inject_faults": "To run without the fault, call cluster.run outside the dk.inject_faults "
    "block.",
    "gloo": "It received more data than its tensor holds: compare the shapes, dtypes and splits "
    "that the ranks pass to this call, and the order of their calls.",
    "SIGKILL": "If memory ran out, use smaller batches or fewer ranks. Otherwise, find the call or "
    "the command that sent the signal, such as os.kill.",
    "SIGSEGV": "It crashed in native code: check the arguments of its last call.",
    "exit status": "Look for a call to os._exit, including in libraries, and raise an exception "
    "instead.",
}
