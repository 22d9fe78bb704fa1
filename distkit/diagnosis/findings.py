"""Findings, and the phrases they are made of. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from distkit._format import named
from distkit.events import Span, _Word
from distkit.trace.calls import at, call


class Kind(_Word):
    """The kind of a mistake, one word for each entry of the catalogue."""

    RAISED = "raised"
    DIED = "died"
    STOPPED = "stopped"  # its process is, by a signal
    RECV_CYCLE = "recv_cycle"  # two ranks receive from each other
    CYCLE = "cycle"  # any other circle of ranks that wait for each other
    NO_RECEIVER = "no_receiver"
    NO_SENDER = "no_sender"
    WRONG_TAG = "wrong_tag"
    WRONG_SOURCE = "wrong_source"
    WRONG_DESTINATION = "wrong_destination"
    MESSAGE_RACE = "message_race"  # it is left to chance which message a receive from any takes
    WRONG_TENSOR = "wrong_tensor"  # the two ends of a message differ in size or dtype
    DIFFERENT_COLLECTIVE = "different_collective"
    ANOTHER_ORDER = "another_order"
    DIFFERENT_REDUCTION = "different_reduction"
    DIFFERENT_ROOT = "different_root"
    DIFFERENT_TENSOR = "different_tensor"  # the members of a collective differ in size or dtype
    SPLIT_MISMATCH = "split_mismatch"  # all_to_all: what is sent is not what is awaited
    SKIPPED = "skipped"  # a rank has ended without a collective that others wait in
    UNEVEN = "uneven"  # a rank has more iterations than another
    WRONG_GROUP = "wrong_group"
    NEW_GROUP = "new_group"
    LEAKED_GROUP = "leaked_group"  # made again and again, and never destroyed
    MISSING_KEY = "missing_key"  # nobody sets the key of a store that a rank waits for
    MISSING_BARRIER = "missing_barrier"
    UNUSED_PARAMETER = "unused_parameter"
    BUFFER_IN_USE = "buffer_in_use"  # irecv's buffer before wait()
    NOT_WAITED = "not_waited"
    ZERO_GRADIENT = "zero_gradient"  # a function of torch's loses it
    STRAGGLER = "straggler"  # slow, not stuck
    IN_BACKEND = "in_backend"  # nobody is missing, and yet it does not end
    BEHIND = "behind"  # has made fewer calls than others, when the record ends
    NOT_JUDGED = "not_judged"  # the record cannot tell


@dataclass(frozen=True)
class Finding:
    """One cause of trouble in a run: what, where, and the remedy.

    Args:
        kind: the entry of the catalogue.
        message: what happened, and on which lines.
        remedy: what to do about it.
        culprits: the ranks whose lines to look at first.
        waiting: the ranks that cannot go on because of it.
        missing_ranks: those that the waiting ones wait for, and that will not come.
        victims: the ranks that raised or died because of it.
        lines: the line of each rank involved.
        hang: whether somebody can never go on. If not, it is a mistake that hangs nobody,
            or a remark.
    """

    kind: Kind
    message: str
    remedy: str
    culprits: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    lines: dict[int, str] = field(default_factory=dict)
    hang: bool = False
    victims: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()


# -- words --------------------------------------------------------------------------

_CLAUSES = 5  # a longer list of clauses is abbreviated


def verb(ranks: Iterable[int], plural: str) -> str:
    """Ranks and what they do: "rank 1 waits", "ranks 0 and 2 wait".

    >>> verb([1], "wait"), verb([0, 2], "wait")
    ('rank 1 waits', 'ranks 0 and 2 wait')
    """
    some = sorted(ranks)
    single = {"have": "has", "go": "goes", "were": "was", "are": "is"}.get(plural, plural + "s")
    return f"{named(some)} {plural if len(some) > 1 else single}"


def tensor(span: Span) -> str:
    """Dtype and shape: "float32[10, 3]"; "" if the call has no tensor."""
    return f"{span.dtype}{list(span.shape)}" if span.dtype else ""


def with_tensor(span: Span) -> str:
    """A call and its tensor: "all_reduce() of float32[3]"."""
    return f"{call(span)} of {tensor(span)}" if span.dtype else call(span)


def clauses(spans: Iterable[Span], plural: str, say: dict[int, str] | None = None) -> str:
    """Clauses about ranks, their calls and lines; ranks on the same line share a clause.

    Args:
        spans: the operations, one for each rank.
        plural: the verb, such as ``"wait in"``.
        say: the words for each rank's operation, if not those of :func:`distkit.trace.calls.call`.
    """
    together: dict[str, list[int]] = defaultdict(list)
    for s in sorted(spans, key=lambda s: s.rank):
        what = say[s.rank] if say else call(s)
        together[what + placed(s)].append(s.rank)
    word, _, rest = plural.partition(" ")
    said = [
        f"{verb(ranks, word)} {rest} {what}".replace("  ", " ") for what, ranks in together.items()
    ]
    return listed(said, ", ")


def placed(span: Span) -> str:
    """The line of a call in a sentence, and that of its ``wait()`` if it waits on another one.

    >>> from distkit.events import Event, Op, State
    >>> from distkit.trace.log import EventLog
    >>> facts = {"waits_at": "a.py:6"}
    >>> sent = Event(0, 0, Op.SEND, State.BLOCKED, 0.0, peer=1, where="a.py:4", attributes=facts)
    >>> placed(EventLog([sent]).spans[0])
    ' at a.py:4 (wait() at a.py:6)'
    """
    waits = span.attributes.get("waits_at", span.where)
    return at(span.where) + (f" (wait() at {waits})" if waits != span.where else "")


def listed(parts: list[str], separator: str) -> str:
    """Parts in a row, abbreviated when there are very many."""
    if len(parts) > _CLAUSES:
        parts = [*parts[:3], "…", f"{parts[-1]} ({len(parts)} in all)"]
    return separator.join(parts)


def lines(*spans: Span) -> dict[int, str]:
    """The line of each rank, as far as it is known."""
    return {s.rank: s.where for s in sorted(spans, key=lambda s: s.rank) if s.where}
