"""The concept checks of the lessons 00 to 03: messages, all-reduce, synchronous SGD."""

from __future__ import annotations

import math
from collections.abc import Iterator

from distkit.events import Op, Span
from distkit.trace.trace import Trace
from distkit_course.content.quizzes.scripted import (
    MS,
    RANKS,
    Line,
    calls,
    collective,
    mark,
    recv,
    script,
    send,
    told,
    waited,
    work,
)
from distkit_course.quizzes import Ask, Concept
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import simulate


def at_once(trace: Trace) -> int:
    """The most ranks that work at the same time."""
    marks = work(trace)
    return max(sum(m.start <= one.start < m.end for m in marks if m.end) for one in marks)


def longest_wait(trace: Trace) -> str:
    """The rank that is in such calls for longest."""
    return RANKS[max(trace.ranks, key=lambda rank: waited(trace, rank))]


# -- 00 --------------------------------------------------------------------------------------


def fork_and_join() -> Trace:
    """Rank 2 works and gives two ranks something to do; rank 1 puts their results together."""
    return script(
        4,
        "fork and join",
        mark(2, 0, 10, "work"),
        send(2, 10, 11, 0),
        send(2, 11, 12, 3),
        recv(0, 0, 11, 2),
        recv(3, 0, 12, 2),
        mark(0, 11, 31, "work"),
        mark(3, 12, 22, "work"),
        recv(1, 0, 32, 0),
        send(0, 31, 32, 1),
        send(3, 22, 33, 1),
        recv(1, 32, 33, 3),
        mark(1, 33, 43, "work"),
    )


WELCOME = Concept(
    "00_welcome",
    "Four ranks again, with another program: some `recv`, all `work`, some `send`.",
    fork_and_join,
    (
        Ask(
            "Which rank works first?",
            RANKS,
            lambda trace: RANKS[work(trace)[0].rank],
            "Its work begins at 0; all the others begin with `recv`.",
        ),
        Ask(
            "How many messages are there?",
            (2, 3, 4, 8),
            lambda trace: len(trace.messages),
            "An arrow is a message; a `send` and its `recv` belong to the same one.",
        ),
        Ask(
            "How many ranks work at the same time, at most?",
            (1, 2, 3, 4),
            at_once,
            "Follow a vertical line: ranks 0 and 3 both work once they have rank 2's message.",
        ),
        Ask(
            "Which rank spends the most time in `send` and `recv`?",
            RANKS,
            longest_wait,
            "It needs both results, and the later one comes last.",
        ),
        Ask(
            "Rank 1 works last. Whose message does it receive first?",
            ("rank 0's", "rank 2's", "rank 3's"),
            lambda trace: f"rank {min(_to_last(trace), key=lambda s: s.end or 0).peer}'s",
            "Its first `recv` is from rank 0: rank 3 is ready earlier and has to wait.",
        ),
    ),
)


def _to_last(trace: Trace) -> list[Span]:
    """The receives of the rank that works last."""
    return [s for s in trace.spans if s.op is Op.RECV and s.rank == work(trace)[-1].rank]


# -- 01 --------------------------------------------------------------------------------------


def handed_on() -> Trace:
    """Two messages, and two ranks that wait for each other at the end."""
    return script(
        3,
        "handed on",
        send(0, 2, 32, 1, 1024),
        mark(1, 0, 30, "busy"),
        recv(1, 30, 32, 0, 1024),
        recv(2, 0, 54, 0, 64),
        mark(0, 32, 52, "busy"),
        send(0, 52, 54, 2, 64),
        recv(1, 32, math.inf, 2),
        recv(2, 54, math.inf, 1),
    )


def ends(trace: Trace) -> str:
    """How the run ends, by the ranks that are still in a call."""
    stuck = [f"{s.rank}" for s in trace.spans if s.end is None]
    return f"ranks {' and '.join(stuck)} wait for each other" if stuck else "all ranks return"


MESSAGES = Concept(
    "01_messages",
    "Three ranks, of which rank 0 sends twice. `send` and `recv` block, as in the lesson.",
    handed_on,
    (
        Ask(
            "Which rank does rank 0 wait for in its first `send`?",
            ("nobody", "rank 2", "rank 1"),
            lambda trace: f"rank {calls(trace, Op.SEND, 0)[0].peer}",
            "Rank 1 is busy and calls `recv` late; the `send` lasts until then.",
        ),
        Ask(
            "About how long does that `send` take?",
            ("2 ms", "30 ms", "50 ms"),
            lambda trace: f"{waited(trace, 0, 1) / MS:.0f} ms",
            "Read where its bar begins and ends on the time axis.",
        ),
        Ask(
            "Rank 0 sends to rank 2: who makes its call first?",
            ("the receiver", "the sender", "both at the same time"),
            lambda trace: (
                "the receiver"
                if calls(trace, Op.RECV, 2)[0].start < calls(trace, Op.SEND, 0)[1].start
                else "the sender"
            ),
            "Rank 2's `recv` begins at 0: it waits for rank 0, which is busy with other things.",
        ),
        Ask(
            "How many messages arrive?",
            (4, 3, 2, 1),
            lambda trace: sum(m.received is not None for m in trace.messages),
            "A `recv` with no arrow into it has received nothing.",
        ),
        Ask(
            "How does the run end?",
            (
                "all ranks return",
                "ranks 0 and 1 wait for each other",
                "ranks 0 and 2 wait for each other",
                "ranks 1 and 2 wait for each other",
            ),
            ends,
            "Both are in `recv`, each for a message that the other would send later: a deadlock.",
        ),
    ),
)


# -- 02 --------------------------------------------------------------------------------------

NBYTES = 1024
LINK = Network(Link(alpha=2e-4, beta=1e-6))


def halves() -> Trace:
    """Halving and doubling between eight ranks."""
    trace = simulate("halving_doubling", 8, NBYTES, LINK)
    return told(trace, name="all-reduce of 1 KiB")


def sent(trace: Trace) -> list[Span]:
    """What rank 0 sends."""
    return calls(trace, Op.SEND, 0)


def recognised(trace: Trace) -> Iterator[str]:
    """The algorithms whose messages these are."""
    for name, words in ALGORITHMS.items():
        other = simulate(name, len(trace.ranks), NBYTES, LINK)
        if [(s.peer, s.nbytes) for s in sent(other)] == [(s.peer, s.nbytes) for s in sent(trace)]:
            yield words


ALGORITHMS = {"ring": "the ring", "halving_doubling": "halving and doubling", "tree": "the tree"}

ALL_REDUCE = Concept(
    "02_all_reduce",
    "Eight ranks reduce a tensor of 1,024 bytes. Point at a bar to see its bytes and its peer.",
    halves,
    (
        Ask(
            "How many messages does rank 0 send?",
            (2, 6, 8, 14),
            lambda trace: len(sent(trace)),
            "Six bars in its lane: 2 lg 8. In a ring there would be 2(8 − 1).",
        ),
        Ask(
            "How many bytes are in its first message?",
            (1024, 512, 256, 128),
            lambda trace: sent(trace)[0].nbytes,
            "Half of the tensor: its partner reduces that half.",
        ),
        Ask(
            "To how many different ranks does rank 0 send?",
            (1, 2, 3, 7),
            lambda trace: len({s.peer for s in sent(trace)}),
            "Three partners, each of which it meets twice. In a ring there is one.",
        ),
        Ask(
            "How many bytes does rank 0 send in total?",
            (1024, 1792, 2048, 7168),
            lambda trace: sum(s.nbytes for s in sent(trace)),
            "512 + 256 + 128, and the same back: 2(n−1)/n times the tensor, as in the ring.",
        ),
        Ask(
            "Which algorithm is it?",
            tuple(ALGORITHMS.values()),
            lambda trace: next(recognised(trace)),
            "The messages become half as large, and then larger again.",
        ),
    ),
)


# -- 03 --------------------------------------------------------------------------------------

STEP, SLOW = 20, (1, 2)


def three_steps() -> Trace:
    """Three steps of four ranks, each with two all-reduces; one rank is late in one step."""
    lines: list[Line] = []
    at = 0.0
    for step in range(3):
        for rank in range(4):
            late = 12 if (step, rank) == SLOW else 0
            lines += [
                mark(rank, at, at + 4, "forward"),
                mark(rank, at + 4, at + 10 + late, "backward"),
                collective(
                    Op.ALL_REDUCE, rank, at + 10 + late, at + 11 + 12 * (step == SLOW[0]), 5120
                ),
            ]
        at += 12 * (step == SLOW[0])
        lines += [collective(Op.ALL_REDUCE, rank, at + 11, at + 13, 33_000) for rank in range(4)]
        lines += [mark(rank, at + 13, at + 14, "update") for rank in range(4)]
        at += 14
    return script(4, "three steps", *lines)


def straggler(trace: Trace) -> str:
    """The rank that waits least in the collectives: the others wait for it."""
    return RANKS[min(trace.ranks, key=lambda rank: waited(trace, rank))]


def late_step(trace: Trace) -> str:
    """The step in which a backward pass lasts longest."""
    lasts = [s.seconds or 0.0 for s in work(trace, "backward")]
    return ("the first", "the second", "the third")[lasts.index(max(lasts)) // len(trace.ranks)]


SYNC_SGD = Concept(
    "03_sync_sgd",
    "Four ranks train together. The marks are `forward`, `backward` and `update`.",
    three_steps,
    (
        Ask(
            "How many steps of training are there?",
            (1, 2, 3, 6),
            lambda trace: len(work(trace, "update")) // len(trace.ranks),
            "Each step ends with an update.",
        ),
        Ask(
            "How many all-reduces are there in each step?",
            (2, 4, 1, 8),
            lambda trace: len(trace.collectives) // 3,
            "Two bars in each lane between backward and update: two buckets of gradients.",
        ),
        Ask(
            "Which rank do the others wait for?",
            RANKS,
            straggler,
            "Its backward lasts longest; the others are in the all-reduce meanwhile.",
        ),
        Ask(
            "In which step do they wait for it?",
            ("the first", "the third", "the second"),
            late_step,
            "In the other steps all ranks enter the all-reduce at the same time.",
        ),
        Ask(
            "The late rank loses 12 ms. How much time does each of the others lose?",
            ("0 ms", "3 ms", "4 ms", "12 ms"),
            lambda trace: f"{max(waited(trace, 0) - waited(trace, 2), 0) / MS:.0f} ms",
            "Nobody returns from an all-reduce before the last rank has entered it.",
        ),
    ),
)

CONCEPTS = (WELCOME, MESSAGES, ALL_REDUCE, SYNC_SGD)
