"""Facts for the diagnosis: a trace, in the order that its questions need. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from distkit._format import named
from distkit.diagnosis.program import Program
from distkit.diagnosis.rank_state import Doing, RankState, WaitForGraph
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
from distkit.trace.awaiting import concerns
from distkit.trace.calls import SILENT, call
from distkit.trace.info import RankEnd
from distkit.trace.log import EventLog, grouped

#: How trouble that was made on purpose begins in what is said of a rank's end.
ASKED = "dk.trouble"

#: How a rank fails that only waited for another one.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|[Tt]imed out|"
    rf"waits for .* which (has ended|{SILENT})"
)


class Evidence:
    """The operations of a trace by what they belong to, and the ranks that are stuck.

    What a release did to the ranks is undone: they stand where they stood before.
    """

    def __init__(self, trace: EventLog) -> None:
        self.trace = trace
        self.ranks = trace.ranks
        begun = [self._as_it_waited(s) for s in trace.spans if s.state is not State.SCHEDULED]
        spans = [s for s in begun if s.match is None]
        self.strangers = [s for s in spans if not s.group]  # calls on a group of others
        self.spans = [s for s in spans if s.group]
        self.asked = [s for s in begun if concerns(s)]  # of a parameter server
        self.by_key = {(s.rank, s.seq): s for s in (*self.spans, *self.asked)}
        failed = {s.rank for s in self.by_key.values() if s.state is State.FAILED}
        ends = trace.info.ends
        self.held = {r for r, end in ends.items() if _was_held(end, r in failed)}
        self.ends = {r: end for r, end in ends.items() if r not in self.held}
        self.board = self._board()
        standings = {r: self.board.standing(r) for r in self.board.stuck()}
        #: What the stuck ranks are in, and whom each of them waits for.
        self.stuck = {r: self.span(standing) for r, standing in standings.items()}
        self.waits_for = {r: standing.waits_for for r, standing in standings.items()}

    @cached_property
    def from_anybody(self) -> list[Span]:
        """The receives that named no source, also where it is known by now who has sent."""
        open_calls = {
            (e.rank, e.seq) for e in self.trace.events if e.op is Op.RECV and e.peer is None
        }
        return [s for s in self.spans if (s.rank, s.seq) in open_calls]

    def _board(self) -> WaitForGraph:
        size = self.trace.info.world_size
        board = WaitForGraph(size or max(self.ranks, default=-1) + 1, self.trace.info.groups)
        board.feed(self._before_release())
        for rank, end in self.ends.items():
            board.end(rank, end.how)
        return board

    def _as_it_waited(self, span: Span) -> Span:
        """An operation with the lines that were noted while its rank waited in it."""
        lines = self._waits.get((span.rank, span.seq))
        if lines is None or span.state is State.COMPLETED:
            return span
        return replace(span, attributes=Attributes({**span.attributes, **lines}))

    @cached_property
    def _waits(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Where each wait that took a while was, and what led there, as far as it was noted."""
        return {
            (e.rank, e.seq): {n: e.attributes[n] for n in ("waits_at", STACK) if n in e.attributes}
            for e in self.trace.events
            if e.state is State.BLOCKED
        }

    def _before_release(self) -> Iterator[Event]:
        """The events without the failures that a release brought: those ranks waited."""
        failed = [
            e
            for e in self.trace.events
            if e.rank in self.held
            and e.state is State.FAILED
            and (e.rank, e.seq) in self.by_key
            and e.op not in COMPUTATION
        ]
        noted = {e.rank for e in failed if (e.rank, e.seq) in self._waits}
        first = {e.rank: e.seq for e in reversed(failed) if e.rank not in noted}
        for e in self.trace.events:
            if e.state is not State.FAILED or e.rank not in self.held:
                yield e
            elif first.get(e.rank) == e.seq:
                yield replace(e, state=State.BLOCKED)

    # -- what led to a call -----------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """The program's texts."""
        return Program(self.trace.info.sources)

    def left_out(
        self, what: Literal["unreduced", "unused"], ranks: Iterable[int]
    ) -> dict[int, list[str]]:
        """What the last backward pass of these ranks has left out, where it has.

        Args:
            what: "unreduced": parameters of DDP's models; "unused": modules of FSDP2's whose
                result it has not used.
            ranks: which.
        """
        noted: dict[int, list[str]] = getattr(self.trace.info, what)
        return {r: found for r in sorted(ranks) if (found := noted.get(r))}

    def raising(self, span: Span) -> tuple[str, str]:
        """The exception that was under way when a call was made, and its line; "" for none."""
        noted = self.trace.info.raising.get(span.rank)
        if noted is None or noted.seq != span.seq:
            return "", ""
        return noted.text, noted.where

    def path(self, span: Span) -> tuple[str, ...]:
        """The line of a call and those that led to it, the innermost first.

        What led to a call is noted when its rank waits; ``wait()`` may be on another line.
        """
        stack: tuple[str, ...] = span.attributes.get(STACK, ())
        if span.where in stack:
            return stack[stack.index(span.where) :]
        here = self.program.scopes(span.where)[:1]
        for outer, line in enumerate(stack, 1):
            if here and self.program.scopes(line)[:1] == here:
                return (span.where, *stack[outer:])
        return (span.where,)

    # -- collectives ------------------------------------------------------------

    @cached_property
    def calls(self) -> dict[str, dict[int, list[Span]]]:
        """The collectives of each group and rank, in their order."""
        spans = sorted(self.spans, key=lambda s: (s.rank, s.seq))
        calls = grouped((s for s in spans if s.op in COLLECTIVES), lambda s: s.group)
        found = {group: grouped(some, lambda s: s.rank) for group, some in calls.items()}
        return defaultdict(dict, found)

    def nth(self, span: Span) -> int:
        """The how manieth collective of its rank and group it is, from 0."""
        return self.calls[span.group][span.rank].index(span)

    def called(self, rank: int, like: Span) -> int:
        """The number of times that a rank has made the same call on the same line."""
        return sum(
            s.where == like.where and s.op is like.op for s in self.calls[like.group].get(rank, [])
        )

    def before(self, rank: int, where: str, span: Span) -> int:
        """The number of times that a rank has come to a line before a call of its own."""
        calls = self.calls[span.group].get(rank, [])
        return sum(s.where == where and s.seq < span.seq for s in calls)

    def call(self, span: Span) -> str:
        """A call, with its group unless that is all ranks."""
        members = self.trace.info.groups.get(span.group)
        if span.group == WORLD or not members:
            return call(span)
        return f"{call(span)} of the group of {named(members)}"

    def members(self, group: str) -> list[int]:
        """The ranks of a group; those seen in it, if nobody has said it."""
        world = range(self.trace.info.world_size) if group == WORLD else ()
        known = self.trace.info.groups.get(group) or world or self.calls[group]
        return list(known)

    # -- messages ---------------------------------------------------------------

    @cached_property
    def _ends_of_messages(self) -> list[list[Span]]:
        """The ends of each message that have begun, the send before the receive."""
        ends = ((m.send, m.recv) for m in self.trace.messages if m.op is Op.SEND)
        return [[self.by_key[end] for end in both if end in self.by_key] for both in ends]

    @cached_property
    def pairs(self) -> list[tuple[Span, Span]]:
        """Each send with its receive, in the order of sending."""
        return [(both[0], both[1]) for both in self._ends_of_messages if len(both) == 2]

    @cached_property
    def alone(self) -> list[Span]:
        """The sends that nobody receives, and the receives to which nobody sends."""
        open_to_all = {
            (s.group, s.rank, s.tag) for s in self.spans if s.op is Op.RECV and s.peer is None
        }
        single = [ends[0] for ends in self._ends_of_messages if len(ends) == 1]
        return [s for s in single if s.op is Op.RECV or (s.group, s.peer, s.tag) not in open_to_all]

    # -- ranks ------------------------------------------------------------------

    def span(self, standing: RankState) -> Span:
        """The operation that a rank is blocked in."""
        assert standing.seq is not None
        return self.by_key[standing.rank, standing.seq]

    def known_of(self, ranks: list[int]) -> str:
        """Known reasons for the early end of ranks, in brackets; "" for none."""
        texts = {self.ends[r].text for r in ranks if r in self.ends} - {""}
        return f" ({'; '.join(sorted(texts))})" if texts else ""

    def last(self, rank: int) -> Span | None:
        """The latest operation of a rank."""
        mine = [s for s in self.by_key.values() if s.rank == rank]
        return max(mine, key=lambda s: s.seq, default=None)

    def ended_in(self, span: Span) -> bool:
        """True if a rank raised or died while it was in this operation."""
        end = self.ends.get(span.rank)
        return (
            end is not None
            and end.is_failure
            and span.state is not State.COMPLETED
            and self.last(span.rank) == span
        )

    def returned(self, rank: int | None) -> bool:
        """True if a rank has come to the end of its program."""
        end = self.ends.get(rank) if rank is not None else None
        return end is not None and end.how == "returned"

    def is_gone(self, rank: int | None) -> bool:
        """True if a rank has not come to a call: it has finished, or its record has."""
        return rank in self.ends and not self.ends[rank].is_failure

    def over(self, ranks: Iterable[int]) -> str:
        """That ranks which are gone "have …", in words."""
        finished = all(map(self.returned, ranks))
        return "finished" if finished else "come to the end of the record"

    def which_is_over(self, rank: int | None) -> str:
        """A relative clause about a rank that is gone; "" for another."""
        return f", which has {self.over([rank])}" if rank is not None and self.is_gone(rank) else ""

    def runs(self, rank: int) -> bool:
        """True if a rank is neither paused nor blocked, and has not ended."""
        return self.board.standing(rank).doing is Doing.RUNNING


def _was_held(end: RankEnd, failed: bool) -> bool:
    if end.how in ("raised", "died"):
        waits = _CONSEQUENCE.search(end.text) is not None
        return waits and (failed or end.how == "died")
    return end.how == "released"


def standings(trace: EventLog) -> list[RankState]:
    """The state of every rank at a trace's end, or where it stood when it was released."""
    return Evidence(trace).board.standings
