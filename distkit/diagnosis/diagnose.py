"""Diagnosis of a run: computes findings from events. No side effects.

A rank is stuck if it is blocked and needs a rank that is stuck, has ended, or has made a different
call. If any one of several ranks could unblock it, as in a receive from any source, this must be
true of all of them. A rank that is still computing may yet arrive. Each cause is reported once,
with the ranks that are waiting because of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from dataclasses import replace

from distkit._format import RANK_NOUN, named
from distkit.diagnosis import deadlocks, kvstore, mismatches, rules
from distkit.diagnosis.divergence import raised_in_flight
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.lint import lint_findings
from distkit.diagnosis.rules import Calls, Finding, fill, lines_of, verb
from distkit.events import Span
from distkit.trace.log import EventLog, grouped


def diagnose(trace: EventLog) -> list[Finding]:
    """Return the mistakes in a complete or partial trace, with the most important ones first.

    Args:
        trace: a live or saved trace. ``info.ends`` states how each rank ended, and ``info.groups``
            the members of each group. If the trace has lost events, or if its calls cannot be
            matched, only failed ranks and the limitations of the recording are reported.

    >>> from distkit.events import Event, Op, State
    >>> states = State.STARTED, State.BLOCKED
    >>> trace = EventLog([Event(r, 0, Op.RECV, s, 0.1 * i, peer=1 - r, where=f"a.py:{4 + r}")
    ...                for r in (0, 1) for i, s in enumerate(states)])
    >>> print(diagnose(trace)[0])
    rank 0 waits in recv(src=1) at a.py:4, rank 1 waits in recv(src=0) at a.py:5: each waits for
    the other. Let one of them send first. [DK101]
    """
    context = copy_context()
    context.run(RANK_NOUN.set, trace.info.rank_noun)
    return context.run(_Diagnosis(Evidence(trace)).findings)


class _Diagnosis:
    """Finds causes one by one, and keeps track of the stuck ranks that they explain."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.explained_ranks = evidence, set[int]()
        # (rank, seq) of calls made while an exception is propagating
        self._leaving_calls: set[tuple[int, int]] = set()

    def findings(self) -> list[Finding]:
        """Return the causes, and a finding for each limitation of the recording."""
        limitations = self.evidence.trace.info.limitations
        notes = (
            rules.incomplete_recording.finding(text=limit.text, advice=limit.remedy)
            for limit in limitations.values()
        )
        return [*self._causes("matching" not in limitations), *notes]

    def _causes(self, may_compare: bool) -> list[Finding]:
        if self.evidence.trace.dropped or not may_compare:
            return list(self._failures(set()))
        raising = list(self._raising_ranks())
        mismatches_found, broken = self._mismatches()
        failures = list(self._failures(broken))
        stuck = list(self._stuck())
        fatal = [f for f in mismatches_found if broken & set(f.lines)]
        others = [f for f in mismatches_found if f not in fatal]
        hangs = [*raising, *fatal, *failures, *(f for f in others if f.hang), *stuck]
        results = [*hangs, *(f for f in others if not f.hang)]
        return [*results, *lint_findings(self.evidence, results)]

    # -- propagating exceptions --------------------------------------------------

    def _raising_ranks(self) -> Iterator[Finding]:
        """Find ranks that are waiting in a collective while an exception is propagating."""
        for rank, span in sorted(self._unexplained().items()):
            finding = raised_in_flight(self.evidence, span)
            if finding is not None and rank not in self.explained_ranks:
                self._leaving_calls.add((rank, span.seq))
                waiting = self._mark_explained({rank}, extra={rank})
                yield self._add_waiting(finding, [r for r in waiting if r != rank], extra=[rank])
        for rank, end in self.evidence.ends.items():  # ranks that failed in such a call
            last = self.evidence.last(rank)
            if end.is_failure and last is not None and self.evidence.raising(last):
                self._leaving_calls.add((rank, last.seq))

    # -- mismatches -------------------------------------------------------------

    def _mismatches(self) -> tuple[list[Finding], set[int]]:
        """Return the mismatches, and the ranks that failed because of them."""
        results, broken = [], set[int]()
        candidates = [*mismatches.collectives(self.evidence), *mismatches.messages(self.evidence)]
        for finding, spans in candidates:
            if not self._leaving_calls.isdisjoint((s.rank, s.seq) for s in spans):
                continue
            victims = [s.rank for s in spans if self.evidence.failed_in(s)]
            stuck_ranks = {s.rank for s in spans if self._is_stuck_in(finding, s)}
            waiting = self._mark_explained({*stuck_ranks, *victims}, extra=stuck_ranks)
            found = self._with_explained_ranks(finding, waiting)
            if victims:
                error = self.evidence.ends[victims[0]].text.partition("\n")[0]
                text = (
                    f"{found.message} {named(victims).capitalize()} failed because of it ({error})."
                )
                found = replace(found, message=text, victims=tuple(victims))
            results.append(found)
            broken.update(victims)
        return results, broken

    def _is_stuck_in(self, finding: Finding, span: Span) -> bool:
        """Return whether a rank is stuck in this call, or in a later call of a shifted sequence."""
        stuck = self.evidence.stuck.get(span.rank)
        if stuck is None or finding.rule is rules.different_reduction:
            return False
        same_group = stuck.group == span.group and stuck.match is None
        return stuck.seq == span.seq or (
            finding.rule.desynchronizes and same_group and stuck.seq > span.seq
        )

    # -- failed ranks -------------------------------------------------------------

    def _failures(self, broken: set[int]) -> Iterator[Finding]:
        """Find ranks that raised or died, grouped by error."""
        ends = self.evidence.ends
        failed = [r for r, end in sorted(ends.items()) if end.is_failure and r not in broken]
        by_error = grouped(
            failed, lambda r: (ends[r].how, _NUMBER.sub("", ends[r].text), ends[r].where)
        )
        for (how, _, where), ranks in sorted(by_error.items(), key=lambda item: item[0][0]):
            text = _ADDRESS.sub("", ends[ranks[0]].text)
            waiting = self._mark_explained(set(ranks))
            failure = deadlocks.failure(self.evidence, ranks, how, text, where)
            yield self._add_waiting(failure, waiting)

    def _add_waiting(
        self, finding: Finding, waiting: list[int], extra: Iterable[int] = ()
    ) -> Finding:
        """Add the ranks that wait for a failed rank; those in ``extra`` are not in the message."""
        if not waiting:
            return self._with_explained_ranks(finding, [*extra], in_message=False)
        spans = [self.evidence.stuck[r] for r in waiting]
        cause = finding.message[:-1]
        message = fill("{cause}; {calls:wait in}.", cause=cause, calls=Calls(spans))
        remedy = deadlocks.remedy_for_awaited_ranks(finding, spans)
        return replace(
            self._with_explained_ranks(finding, sorted([*waiting, *extra]), in_message=False),
            message=message,
            remedy=remedy,
            lines={**lines_of(*spans), **finding.lines},
        )

    # -- stuck ranks ----------------------------------------------------------------

    def _stuck(self) -> Iterator[Finding]:
        """Find causes for the stuck ranks that no other finding has explained."""
        causes = (
            deadlocks.wrong_end,
            kvstore.unanswered,
            deadlocks.missing_key,
            deadlocks.destroyed_group,
            deadlocks.finished_partner,
            deadlocks.wait_cycle,
        )
        for cause in causes:
            while (result := cause(self.evidence, self._unexplained())) is not None:
                finding, ranks = result
                waiting = self._mark_explained({*finding.culprits, *ranks}, extra=ranks)
                yield self._with_explained_ranks(finding, waiting, named_ranks=ranks)

    def _unexplained(self) -> dict[int, Span]:
        return {r: s for r, s in self.evidence.stuck.items() if r not in self.explained_ranks}

    def _mark_explained(self, causes: set[int], extra: Iterable[int] = ()) -> list[int]:
        """Mark the stuck ranks that depend on ``causes`` as explained, and return them."""
        waiting = set(extra)
        while added := {
            r
            for r, awaited in self.evidence.waits_for.items()
            if r not in waiting and not (causes.isdisjoint(awaited) and waiting.isdisjoint(awaited))
        }:
            waiting |= added
        waiting -= self.explained_ranks
        self.explained_ranks |= waiting
        return sorted(waiting)

    def _with_explained_ranks(
        self,
        finding: Finding,
        waiting: list[int],
        in_message: bool = True,
        named_ranks: Iterable[int] = (),
    ) -> Finding:
        """Add the stuck ranks that a finding explains; do not mention ``named_ranks`` again."""
        others = [r for r in waiting if r not in {*finding.lines, *finding.waiting, *named_ranks}]
        message = finding.message
        if in_message and others:
            message = f"{message} {verb(others, 'wait').capitalize()} as a result."
        return replace(
            finding,
            message=message,
            waiting=tuple(waiting),
            hang=finding.hang or bool(waiting),
            lines={**finding.lines, **lines_of(*(self.evidence.stuck[r] for r in others))},
        )


#: Matches the parts of an error's text that are specific to one rank.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+| for rank \d+")

#: Matches numbers, which may differ between two ranks' texts of the same error.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
