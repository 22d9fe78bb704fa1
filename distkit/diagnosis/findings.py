"""Findings, and the formatting of their sentences. No side effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from string import Formatter
from typing import TYPE_CHECKING, Any

from distkit._format import count, named, ordinal, times
from distkit.events import CallRecord, Span
from distkit.trace.calls import at, call
from distkit.trace.log import grouped

if TYPE_CHECKING:
    from distkit.diagnosis.rules import Rule

#: Folder of the rules' pages, relative to a notebook of this repository.
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


# -- sentences ----------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """Operations in a sentence, with the function that formats an operation."""

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
    ``{ranks}`` becomes a list of ranks, ``{ranks:have}`` ranks with a verb, which the template
    contains in the plural, ``{n:th}`` an ordinal, ``{n:message}`` a count, and ``{where:at}`` a
    line.

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
    """Return dtype and shape, such as "float32[10, 3]"; "" if the call has no tensor."""
    return f"{span.dtype}{list(span.shape)}" if span.dtype else ""


def with_tensor(span: CallRecord) -> str:
    """Return a call with its tensor, such as "all_reduce() of float32[3]"."""
    return f"{call(span)} of {tensor(span)}" if span.dtype else call(span)


def clauses(spans: Iterable[Span], spec: str, write: Callable[[Span], str] = call) -> str:
    """Return clauses with ranks, calls and lines, one for all ranks with the same call and line.

    Args:
        spans: the operations.
        spec: the verb in the plural, such as ``"wait in"``. Text after ``"|"`` replaces the call.
        write: formats a call.
    """
    phrase, _, replacement = spec.partition("|")
    in_order = sorted(spans, key=lambda s: s.rank)
    by_call = grouped(in_order, lambda s: (replacement or write(s)) + location(s))
    plural, _, preposition = phrase.partition(" ")
    parts = [
        f"{verb({s.rank for s in group}, plural)} {preposition} {text}".replace("  ", " ")
        for text, group in by_call.items()
    ]
    return listed(parts)


def location(span: Span) -> str:
    """Return a phrase with the line of a call, and the line of its ``wait()`` if different.

    >>> from distkit.events import Event, Op, State
    >>> facts = {"waits_at": "a.py:6"}
    >>> sent = Event(0, 0, Op.SEND, State.BLOCKED, 0.0, peer=1, where="a.py:4", attributes=facts)
    >>> from distkit.trace.log import EventLog
    >>> location(EventLog([sent]).spans[0])
    ' at a.py:4 (wait() at a.py:6)'
    """
    waits = span.attributes.get("waits_at", span.where)
    return at(span.where) + (f" (wait() at {waits})" if waits != span.where else "")


def listed(parts: list[str]) -> str:
    """Join clauses and abbreviate a long list."""
    if len(parts) > _MAX_CLAUSES:
        parts = [*parts[:3], "…", f"{parts[-1]} ({len(parts)} in all)"]
    return ", ".join(parts)


def lines_of(*spans: Span) -> dict[int, str]:
    """Return the line of each rank, if known."""
    return {s.rank: s.where for s in sorted(spans, key=lambda s: s.rank) if s.where}
