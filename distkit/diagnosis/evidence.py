"""Evidence for a diagnosis, queried from a trace. No side effects."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from distkit._format import named
from distkit.diagnosis.program import Program
from distkit.diagnosis.rank_state import RankStatus, WaitForGraph
from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    STACK,
    WORLD,
    Attributes,
    Event,
    Op,
    Span,
    State,
)
from distkit.trace.awaiting import is_server_request
from distkit.trace.calls import call, last_call
from distkit.trace.info import Raising, RankEnd
from distkit.trace.log import EventLog, grouped

#: Matches secondary errors, on ranks that were only waiting for another rank.
_SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|[Tt]imed out|"
    r"waits for .* which has exited"
)


class Evidence:
    """An index of a trace's operations and of its stuck ranks.

    In ``graph``, a released rank has the state that it had before it was released.
    """

    def __init__(self, trace: EventLog) -> None:
        self.trace = trace
        self.ranks = trace.ranks
        started = [self._with_wait_lines(s) for s in trace.spans if s.state is not State.SCHEDULED]
        spans = [s for s in started if s.match is None]
        self.nonmember_calls = [s for s in spans if not s.group]
        self.spans = [s for s in spans if s.group]
        self.server_requests = [s for s in started if is_server_request(s)]
        self.by_key = {(s.rank, s.seq): s for s in (*self.spans, *self.server_requests)}
        failed = {s.rank for s in self.by_key.values() if s.state is State.FAILED}
        ends = trace.info.ends
        self.released = {r for r, end in ends.items() if _was_released(end, r in failed)}
        self.ends = {r: end for r, end in ends.items() if r not in self.released}
        self.graph = self._build_graph()
        waits = {r: self.graph.wait(r) for r in self.graph.stuck()}
        #: The operations of the stuck ranks, and the ranks that each of them waits for.
        self.stuck = {r: self.by_key[r, e.seq] for r, e in waits.items() if e is not None}
        self.waits_for = {r: self.graph.rank_state(r).waits_for for r in self.stuck}

    @cached_property
    def touches(self) -> dict[tuple[int, int], Span]:
        """The last premature use of each call's tensors, by ``(rank, seq)`` of the call."""
        uses = [s for s in self.trace.spans if s.op is Op.TOUCH and (s.match or "").isdecimal()]
        return {(s.rank, int(s.match or 0)): s for s in uses}

    @cached_property
    def destroy_marks(self) -> dict[tuple[int, str], Span]:
        """The marks of destroyed groups, by rank and group."""
        marks = [s for s in self.trace.spans if s.op is Op.MARK and "destroyed" in s.attributes]
        return {(s.rank, s.attributes["destroyed"]): s for s in marks}

    @cached_property
    def any_source_receives(self) -> list[Span]:
        """The receives from any source, including those that have already matched a sender."""
        open_calls = {
            (e.rank, e.seq) for e in self.trace.events if e.op is Op.RECV and e.peer is None
        }
        return [s for s in self.spans if (s.rank, s.seq) in open_calls]

    def _build_graph(self) -> WaitForGraph:
        info = self.trace.info
        size = info.world_size or max(self.ranks, default=-1) + 1
        graph = WaitForGraph(size, info.groups, info.rank_noun)
        graph.feed(self._before_release())
        for rank, end in self.ends.items():
            graph.end(rank, end.how)
        return graph

    def _with_wait_lines(self, span: Span) -> Span:
        """Add the line and stack of the wait to an operation that has not completed."""
        lines = self._waits.get((span.rank, span.seq))
        if lines is None or span.state is State.COMPLETED:
            return span
        return replace(span, attributes=Attributes({**span.attributes, **lines}))

    @cached_property
    def _waits(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The line and stack of each recorded wait."""
        return {
            (e.rank, e.seq): {n: e.attributes[n] for n in ("waits_at", STACK) if n in e.attributes}
            for e in self.trace.events
            if e.state is State.BLOCKED
        }

    def _before_release(self) -> Iterator[Event]:
        """Yield all events except failures caused by a release.

        If a released rank has no recorded wait, its first failed call is yielded as a wait.
        """
        failed = [
            e
            for e in self.trace.events
            if e.rank in self.released
            and e.state is State.FAILED
            and (e.rank, e.seq) in self.by_key
            and e.op not in COMPUTATION
        ]
        with_wait = {e.rank for e in failed if (e.rank, e.seq) in self._waits}
        first = {e.rank: e.seq for e in reversed(failed) if e.rank not in with_wait}
        for e in self.trace.events:
            if e.state is not State.FAILED or e.rank not in self.released:
                yield e
            elif first.get(e.rank) == e.seq:
                yield replace(e, state=State.BLOCKED)

    # -- source code ------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """The program's source code."""
        return Program(self.trace.info.sources)

    def unused_parameters(self, ranks: Iterable[int]) -> dict[int, list[str]]:
        """Return the DDP parameters that each rank's last backward pass did not use."""
        recorded = self.trace.info.unreduced
        return {r: names for r in sorted(ranks) if (names := recorded.get(r))}

    def raising(self, span: Span) -> Raising | None:
        """Return the exception that propagated during a call; None if there was none."""
        recorded = self.trace.info.raising.get(span.rank)
        return recorded if recorded is not None and recorded.seq == span.seq else None

    def path(self, span: Span) -> tuple[str, ...]:
        """Return the stack of a call as source lines, innermost first.

        The stack is recorded while the rank is waiting, so it may start at the line of ``wait()``.
        """
        stack: tuple[str, ...] = span.attributes.get(STACK, ())
        return stack[stack.index(span.where) :] if span.where in stack else (span.where,)

    # -- collectives ------------------------------------------------------------

    @cached_property
    def calls(self) -> dict[str, dict[int, list[Span]]]:
        """The collectives of each group and rank, in order."""
        spans = sorted(self.spans, key=lambda s: (s.rank, s.seq))
        calls = grouped((s for s in spans if s.op in COLLECTIVES), lambda s: s.group)
        by_group = {
            group: grouped(group_calls, lambda s: s.rank) for group, group_calls in calls.items()
        }
        return defaultdict(dict, by_group)

    def nth(self, span: Span) -> int:
        """Return the index of a collective among its rank's calls on its group."""
        return self.calls[span.group][span.rank].index(span)

    def count_calls(self, rank: int, span: Span) -> int:
        """Return how many times a rank has made the same call on the same line."""
        return sum(
            s.where == span.where and s.op is span.op for s in self.calls[span.group].get(rank, [])
        )

    def count_earlier_calls(self, rank: int, where: str, span: Span) -> int:
        """Return how many collectives a rank called at ``where`` before ``span``."""
        calls = self.calls[span.group].get(rank, [])
        return sum(s.where == where and s.seq < span.seq for s in calls)

    def call(self, span: Span) -> str:
        """Return a call as text, with its group unless it is the world."""
        members = self.trace.info.groups.get(span.group)
        if span.group == WORLD or not members:
            return call(span)
        return f"{call(span)} on the group of {named(members)}"

    def members(self, group: str) -> list[int]:
        """Return the members of a group or, if they are unknown, the ranks that have used it."""
        world = range(self.trace.info.world_size) if group == WORLD else ()
        return list(self.trace.info.groups.get(group) or world or self.calls[group])

    # -- messages ---------------------------------------------------------------

    @cached_property
    def _message_ends(self) -> list[list[Span]]:
        """The calls of each message, the send first; calls that have not started are omitted."""
        ends = ((m.send, m.recv) for m in self.trace.messages if m.op is Op.SEND)
        return [[self.by_key[end] for end in both if end in self.by_key] for both in ends]

    @cached_property
    def pairs(self) -> list[tuple[Span, Span]]:
        """The sends with their receives, sorted by send time."""
        return [(both[0], both[1]) for both in self._message_ends if len(both) == 2]

    @cached_property
    def unmatched(self) -> list[Span]:
        """The sends without a receive, and the receives without a send.

        Omits sends that an any-source receive might match.
        """
        any_source = {
            (s.group, s.rank, s.tag) for s in self.spans if s.op is Op.RECV and s.peer is None
        }
        single = [ends[0] for ends in self._message_ends if len(ends) == 1]
        return [s for s in single if s.op is Op.RECV or (s.group, s.peer, s.tag) not in any_source]

    # -- ranks ------------------------------------------------------------------

    def known_reasons(self, ranks: list[int]) -> str:
        """Return the reasons why ranks ended, in parentheses; "" if unknown."""
        reasons = {self.ends[r].text for r in ranks if r in self.ends} - {""}
        return f" ({'; '.join(sorted(reasons))})" if reasons else ""

    def last(self, rank: int) -> Span | None:
        """Return the latest operation of a rank."""
        return last_call(self.by_key.values(), rank)

    def failed_in(self, span: Span) -> bool:
        """Return whether a rank raised or died in this operation."""
        end = self.ends.get(span.rank)
        return (
            end is not None
            and end.is_failure
            and span.state is not State.COMPLETED
            and self.last(span.rank) == span
        )

    def returned(self, rank: int | None) -> bool:
        """Return whether a rank has reached the end of its program."""
        end = self.ends.get(rank) if rank is not None else None
        return end is not None and end.how == "returned"

    def has_ended(self, rank: int | None) -> bool:
        """Return whether a rank, or its recording, has ended without failure."""
        return rank in self.ends and not self.ends[rank].is_failure

    def end_phrase(self, ranks: Iterable[int]) -> str:
        """Return how ranks have ended, as a participle that follows "have"."""
        return "finished" if all(map(self.returned, ranks)) else "reached the end of the recording"

    def ended_clause(self, rank: int | None) -> str:
        """Return a relative clause about a rank that has ended without failure; "" otherwise."""
        return (
            f", which has {self.end_phrase([rank])}"
            if rank is not None and self.has_ended(rank)
            else ""
        )

    def is_running(self, rank: int) -> bool:
        """Return whether a rank is neither paused nor blocked, and has not ended."""
        return self.graph.rank_state(rank).status is RankStatus.RUNNING


def _was_released(end: RankEnd, failed: bool) -> bool:
    if end.how in ("raised", "died"):
        return (failed or end.how == "died") and _SECONDARY.search(end.text) is not None
    return end.how == "released"
