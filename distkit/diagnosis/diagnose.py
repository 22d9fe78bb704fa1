"""Diagnosis of a run in the learner's words: events in, findings out. Pure.

A rank is stuck when it is blocked, and everything that it waits for is stuck itself or has ended;
one that still computes may yet come. Each cause is told once: those who only wait because of it
are named with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from distkit._format import named
from distkit.diagnosis import deadlocks, groups, kvstore, mismatches, rules
from distkit.diagnosis.behind import behind, unjudged
from distkit.diagnosis.divergence import in_flight
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding, fill, lines_of, verb
from distkit.diagnosis.lint import remarks
from distkit.diagnosis.silent import silent
from distkit.events import Span
from distkit.trace.log import EventLog, grouped

__all__ = ["Finding", "diagnose"]


def diagnose(trace: EventLog) -> list[Finding]:
    """The mistakes in a trace, complete or not: the most important first.

    Args:
        trace: live or saved; ``info.ends`` tells how ranks have ended, and ``info.groups``
            who belongs to which group. Of a trace that has lost events only the failures
            of ranks are told.

    >>> from distkit.events import Event, Op, State
    >>> states = State.STARTED, State.BLOCKED
    >>> trace = EventLog([Event(r, 0, Op.RECV, s, 0.1 * i, peer=1 - r, where=f"a.py:{4 + r}")
    ...                for r in (0, 1) for i, s in enumerate(states)])
    >>> print(diagnose(trace)[0])
    rank 0 waits in recv(src=1) at a.py:4, rank 1 waits in recv(src=0) at a.py:5: each waits for
    the other. Let one of them send first. [DK101]
    """
    return _Diagnosis(Evidence(trace)).findings()


class _Diagnosis:
    """Finds causes one after the other; ``told`` are the stuck ranks that they explain."""

    def __init__(self, facts: Evidence) -> None:
        self.facts, self.told = facts, set[int]()
        self._left = set[tuple[int, int]]()  # calls on the way out of an exception

    def findings(self) -> list[Finding]:
        """The causes, and what the record cannot tell."""
        limits = self.facts.trace.info.limits
        if "completions" not in limits:
            found = self._causes("matching" not in limits)
        else:
            found = [f for f, _ in mismatches.collectives(self.facts) if "matching" not in limits]
            found += behind(self.facts)
        return [*found, *unjudged(self.facts, found)]

    def _causes(self, may_compare: bool) -> list[Finding]:
        if self.facts.trace.dropped or not may_compare:
            return list(self._failures(set()))
        leaving = list(self._leaving())
        wrong, broken = self._mismatches()
        failures = list(self._failures(broken))
        stuck = list(self._stuck())
        fatal = [f for f in wrong if broken & set(f.lines)]
        others = [f for f in wrong if f not in fatal]
        hangs = [*leaving, *fatal, *failures, *(f for f in others if f.hang), *stuck]
        found = [*self._stopped(), *hangs, *(f for f in others if not f.hang)]
        found += silent(self.facts, found)
        return [*found, *remarks(self.facts, found)]

    def _stopped(self) -> Iterator[Finding]:
        """Ranks whose processes a signal has stopped: they may yet come, if somebody lets them."""
        info = self.facts.trace.info
        for rank, how in sorted(info.stopped.items()):
            known = info.rank(rank)
            serves = known.role in ("server", "scheduler")
            yield (rules.stopped_server if serves else rules.stopped).finding(
                culprits=[] if serves else [rank],
                who=known.name if serves else f"rank {rank}",
                how=how,
                silence=self._silence(rank),
                pid=known.pid or "its pid",
            )

    def _silence(self, rank: int) -> str:
        """The time for which a stopped process has sent no heartbeat, if known."""
        since, until = self.facts.trace.info.silent_since.get(rank), self.facts.trace.info.until
        if since is None or until is None:
            return ""
        return rules.stopped.say("silent", seconds=max(0.0, until - since))

    # -- exceptions under way -----------------------------------------------------

    def _leaving(self) -> Iterator[Finding]:
        """Ranks that wait in a collective while an exception is under way."""
        for rank, span in sorted(self._untold().items()):
            finding = in_flight(self.facts, span)
            if finding is not None and rank not in self.told:
                self._left.add((rank, span.seq))
                waiting = self._explain({rank}, also={rank})
                yield self._with_waiting(finding, [r for r in waiting if r != rank], also=[rank])
        for rank, end in self.facts.ends.items():  # released there: the exception is the cause
            last = self.facts.last(rank)
            if end.is_failure and last is not None and self.facts.raising(last)[0]:
                self._left.add((rank, last.seq))

    # -- mismatches -------------------------------------------------------------

    def _mismatches(self) -> tuple[list[Finding], set[int]]:
        """The mismatches, and the ranks that failed because of them."""
        found, broken = [], set[int]()
        together = [*mismatches.collectives(self.facts), *mismatches.messages(self.facts)]
        for finding, spans in together:
            if not self._left.isdisjoint((s.rank, s.seq) for s in spans):
                continue
            victims = [s.rank for s in spans if self.facts.ended_in(s)]
            held = {s.rank for s in spans if self._hangs(finding, s)}
            waiting = self._explain({*held, *victims}, also=held)
            found.append(self._with_victims(self._waited(finding, waiting), victims))
            broken.update(victims)
        return found, broken

    def _hangs(self, finding: Finding, span: Span) -> bool:
        """True if a rank is stuck in this very call, or behind one where the order broke."""
        its = self.facts.stuck.get(span.rank)
        if its is None or finding.rule is rules.different_reduction:
            return False
        same = its.group == span.group and its.match is None
        behind = finding.rule.shifts and same and its.seq > span.seq
        return its.seq == span.seq or behind

    def _with_victims(self, finding: Finding, victims: list[int]) -> Finding:
        if not victims:
            return finding
        how = self.facts.ends[victims[0]].text.partition("\n")[0]
        message = f"{finding.message} {_capital(named(victims))} failed because of it ({how})."
        return replace(finding, message=message, victims=tuple(victims))

    # -- ranks that failed --------------------------------------------------------

    def _failures(self, broken: set[int]) -> Iterator[Finding]:
        """Ranks that raised or died, those in the same way together."""
        ends = self.facts.ends
        failed = [r for r, end in sorted(ends.items()) if end.is_failure and r not in broken]
        alike = grouped(
            failed, lambda r: (ends[r].how, _NUMBER.sub("", ends[r].text), ends[r].where)
        )
        for (how, _, where), ranks in sorted(alike.items(), key=lambda item: item[0][0]):
            text = _ADDRESS.sub("", ends[ranks[0]].text)
            waiting = self._explain(set(ranks))
            failure = deadlocks.failure(self.facts, ranks, how, text, where)
            yield self._with_waiting(groups.explained(self.facts, failure), waiting)

    def _with_waiting(
        self, finding: Finding, waiting: list[int], also: Iterable[int] = ()
    ) -> Finding:
        """Add those who wait for a rank that failed, with their lines; ``also`` it itself."""
        if not waiting:
            return self._waited(finding, [*also], in_words=False)
        spans = [self.facts.stuck[r] for r in waiting]
        cause = finding.message[:-1]
        message = fill("{cause}; {here:wait in}.", cause=cause, here=Calls(spans))
        remedy = kvstore.way_on(deadlocks.first(finding), spans)
        return replace(
            self._waited(finding, sorted([*waiting, *also]), in_words=False),
            message=message,
            remedy=remedy,
            lines={**lines_of(*spans), **finding.lines},
        )

    # -- ranks that wait ------------------------------------------------------------

    def _stuck(self) -> Iterator[Finding]:
        """Findings for the stuck ranks that no other finding has explained."""
        causes = (
            deadlocks.wrong_end,
            kvstore.unanswered,
            deadlocks.without_key,
            groups.destroyed,
            deadlocks.left_alone,
            deadlocks.circle,
        )
        for cause in causes:
            while (found := cause(self.facts, self._untold())) is not None:
                finding, core = found
                waiting = self._explain({*finding.culprits, *core}, also=core)
                yield self._waited(finding, waiting, told=core)

    def _untold(self) -> dict[int, Span]:
        return {r: s for r, s in self.facts.stuck.items() if r not in self.told}

    def _explain(self, causes: set[int], also: Iterable[int] = ()) -> list[int]:
        """The stuck ranks that wait for these, directly or not: they need no other cause."""
        waiting = set(also)
        reached = causes | waiting
        while more := {
            r
            for r, awaited in self.facts.waits_for.items()
            if r not in waiting and not reached.isdisjoint(awaited)
        }:
            waiting |= more
            reached |= more
        waiting -= self.told
        self.told |= waiting
        return sorted(waiting)

    def _waited(
        self,
        finding: Finding,
        waiting: list[int],
        in_words: bool = True,
        told: Iterable[int] = (),
    ) -> Finding:
        """Name the stuck ranks that a finding explains, but for those that it has ``told``."""
        others = [r for r in waiting if r not in {*finding.lines, *finding.waiting, *told}]
        message = finding.message
        if in_words and others:
            message = f"{message} {_capital(verb(others, 'wait'))} in turn."
        return replace(
            finding,
            message=message,
            waiting=tuple(waiting),
            hang=finding.hang or bool(waiting),
            lines={**finding.lines, **lines_of(*(self.facts.stuck[r] for r in others))},
        )


#: The parts of an error's text that belong to one rank alone: addresses, and its own number.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+| for rank \d+")

#: What differs in two ranks' texts of the same error.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
