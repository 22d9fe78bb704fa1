"""Exercises on rings across machines: the bytes sent between machines, and the best rank order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

from distkit.algorithms.all_reduce.ring import schedule as ring
from distkit_course.judges import Calls, call_answer, same
from distkit_course.task import Answer, Criterion, NotAttempted, Task, WrongAnswer

# -- solutions ------------------------------------------------------------------------------


def best_order(hosts: Sequence[str]) -> list[int]:
    """The ranks of a machine are neighbors, so each machine sends to at most one other."""
    return sorted(range(len(hosts)), key=lambda rank: hosts[rank])


def bytes_between(hosts: Sequence[str], nbytes: int) -> float:
    """A rank sends all its messages to its right neighbor, which may be on another machine."""
    n = len(hosts)
    return sum(hosts[r] != hosts[(r + 1) % n] for r in range(n)) * 2 * (n - 1) * nbytes / n


# -- the judge -------------------------------------------------------------------------------

#: Size of each rank's chunk of the tensor [bytes].
CHUNK = 1000
#: A case in which common mistakes yield different numbers.
FIRST_CASE = ["alpha", "beta", "gamma"]


def placements() -> Iterator[list[str]]:
    """Yield every placement of two to five ranks on up to three machines."""
    for n in range(2, 6):
        yield from (list(hosts) for hosts in product(("alpha", "beta", "gamma"), repeat=n))


def sent_between(hosts: list[str]) -> int:
    """Return the number of bytes that a ring's schedule sends between machines."""
    crossings = [
        hosts[src] != hosts[dst]
        for t in ring(len(hosts))
        for src, dst in zip(t.src, t.dst, strict=True)
    ]
    return CHUNK * int(sum(crossings))


def open_ended(hosts: list[str], nbytes: int) -> float:
    """Leaves out the messages from the last rank to the first."""
    return sum(a != b for a, b in pairwise(hosts)) * 2 * (len(hosts) - 1) * nbytes / len(hosts)


def judge_order(answer: Answer) -> Iterator[Criterion]:
    """Count pairs of neighbors on different machines."""
    cases = [*placements()]
    outputs = call_answer(answer, [(hosts,) for hosts in cases], "hosts={}".format)
    for at, (hosts, returned) in enumerate(zip(cases, outputs, strict=True)):
        case = f"hosts={hosts}"
        if returned is None and not at:
            raise NotAttempted
        if not isinstance(returned, list | tuple) or sorted(map(str, returned)) != [
            str(r) for r in range(len(hosts))
        ]:
            raise WrongAnswer(
                f"{case}: it returns {returned!r}: return each rank once, "
                f"from 0 to {len(hosts) - 1}"
            )
        machines, least = [hosts[r] for r in returned], len(set(hosts))
        crossings = sum(a != b for a, b in zip(machines, [*machines[1:], machines[0]], strict=True))
        if crossings > (least if least > 1 else 0):
            raise WrongAnswer(
                f"{case}: in {returned}, {crossings} pairs of neighbors are on different machines; "
                f"{least} suffice"
            )
    yield Criterion("values", f"a best order for each of {len(cases):,} placements")


def _why_bytes(returned: Any, expected: float, hosts: list[str], nbytes: int) -> str:
    """Return the likely mistake behind an answer."""
    n, last = len(hosts), hosts[-1] != hosts[0]
    crossings = sum(hosts[rank - 1] != hosts[rank] for rank in range(n))
    each = 2 * (n - 1) * CHUNK
    mistakes = {
        crossings * each / 2: "each chunk travels around the ring twice",
        (crossings - last) * each: "the last rank sends to the first",
        n * each: "count only ranks whose right neighbor is on another machine",
    }
    return next((why for number, why in mistakes.items() if same(returned, number)), "")


TASKS = [
    Task(
        "bytes_between",
        "bytes_between(hosts, nbytes)",
        "return the total number of bytes that a ring all-reduce sends between machines",
        "hosts[r] is the machine of rank r, and nbytes is the size of the tensor. Each of n ranks "
        "sends 2(n-1) messages of nbytes/n to its right neighbor. The right neighbor of the last "
        "rank is rank 0.",
        bytes_between,
        (
            "For which ranks is the right neighbor, (rank + 1) % n, on another machine?",
            "Each of them sends 2(n-1) messages of nbytes/n.",
        ),
        Calls(
            lambda hosts, nbytes: sent_between(hosts),
            [(hosts, CHUNK * len(hosts)) for hosts in (FIRST_CASE, *placements())],
            _why_bytes,
        ),
        (
            (
                lambda hosts, nbytes: bytes_between(hosts, nbytes) / 2,
                "expected 12000: each chunk travels around the ring twice",
            ),
            (open_ended, ": the last rank sends to the first"),
            (lambda hosts, nbytes: 2 * (len(hosts) - 1) * nbytes, "on another machine"),
            (lambda hosts, nbytes: "all", "it returns 'all'; expected 12000"),
        ),
    ),
    Task(
        "best_order",
        "best_order(hosts)",
        "return an order of the ranks in which a ring sends the fewest bytes between machines",
        "hosts[r] is the machine of rank r, as in ['alpha', 'beta', 'alpha', 'beta'].",
        best_order,
        (
            "Each pair of neighbors on different machines costs the same. How many are necessary?",
            "If there are two or more machines, one per machine is enough. Put the ranks of a "
            "machine next to each other. sorted() has a parameter key.",
        ),
        judge_order,
        (
            (
                lambda hosts: list(range(len(hosts))),
                "4 pairs of neighbors are on different machines; 2 suffice",
            ),
            (lambda hosts: sorted(hosts), "return each rank once, from 0 to 1"),
            (lambda hosts: [best_order(hosts), hosts.sort()][0], "arguments must not change"),
            (lambda hosts: sorted(range(len(hosts)), key=lambda r: r % 2), "2 suffice"),
        ),
    ),
]
