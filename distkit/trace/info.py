"""Facts of a run besides its events. Pure data; msgspec reads, checks and writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

#: A trace has fewer ranks than this; ten times as many as the largest simulations.
MOST_RANKS = 100_000
#: Whole numbers are smaller than this: JSON and numpy agree on them.
LARGEST = 2**53
#: The operations of each process in a rank's place are numbered from a multiple of this.
APART = 1 << 32

Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Count = Annotated[int, Meta(ge=0, lt=LARGEST)]
Whole = Annotated[int, Meta(gt=-LARGEST, lt=LARGEST)]
Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]


class RankInfo(Struct, frozen=True, omit_defaults=True):
    """One process of a run.

    Args:
        name: as views and messages call it: "rank 3", "server 0".
        role: "rank", "worker", "server" or "scheduler".
        host: the name of its machine.
        pid: of its process there; of an NCCL log without pids, the file.
        device: where its tensors are.
        file: in which another program recorded it.
    """

    name: str = ""
    role: str = ""
    host: str = ""
    pid: int | str = ""
    device: str = ""
    file: str = ""


class RankEnd(Struct, frozen=True, omit_defaults=True):
    """How a rank ended.

    Args:
        how: "returned", "raised", "died", or "released" by others' failure or an interrupt; or
            "elsewhere", not in a call, when the trace ends.
        text: the exception, or the cause of the death.
        where: the user's ``file:line``.
        time: of the end [s], where it is known.
    """

    how: Literal["returned", "raised", "died", "released", "elsewhere"]
    text: str = ""
    where: str = ""
    time: Number | None = None

    @property
    def is_failure(self) -> bool:
        """True if something took the rank out of its program."""
        return self.how not in ("returned", "elsewhere")


class Replacement(Struct, frozen=True):
    """A process that ended and was replaced: at this time [s]."""

    node: Rank
    name: str
    how: str
    time: Number


class ClockOffset(Struct, frozen=True, omit_defaults=True):
    """How far a host's clock was ahead of the trace's [s].

    Args:
        ahead: by this much.
        error: the times of the host are wrong by at most this; None if only wall clocks tell.
    """

    ahead: Number
    error: Number | None = None


class Limit(Struct, frozen=True, omit_defaults=True):
    """What a record cannot tell, and what to do about it; ``calls`` that it has lost."""

    text: str
    remedy: str
    calls: Count = 0


class Raising(Struct, frozen=True):
    """An exception that propagates on a rank, from its operation ``seq`` on."""

    seq: Whole
    text: str
    where: str


class Wait(Struct, frozen=True, array_like=True):
    """The operations ``seqs`` that a rank waits in, since when and until when at least [s]."""

    seqs: tuple[Whole, ...]
    since: Number
    until: Number


class Terms(Struct, frozen=True, omit_defaults=True):
    """The terms of a parameter server: its mode, bound of staleness, and backup workers."""

    mode: str = ""
    staleness: Count | None = None
    backup: Count = 0


class RunInfo(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Facts of a run besides its events.

    Args:
        name: of the run.
        world_size: the number of ranks; 0 if it is not known.
        groups: the ranks of each process group.
        ends: of the ranks that have ended.
        until: when the trace ends [s].
        raising: the exception that propagates on a rank.
        unreduced: the parameters whose gradients no rank reduced.
        unused: the parameters that had no gradient.
        unwaited: the operations of each rank that nobody waited for.
        backend: of ``torch.distributed``.
        device: of all ranks.
        simulated: True if no process ran.
        seed: from which the ranks' random numbers were derived.
        terms: of the parameter server.
        seconds: how long the run took.
        interrupted: True if somebody ended it.
        ranks: the processes, servers and the scheduler among them.
        dropped: events that the bounded buffers lost, of each rank or the notebook.
        without_values: operations of each rank whose values cost too much to look at.
        threads: the groups whose collectives several threads of a rank call.
        unseen: how often each rank did what is not recorded, or is not judged.
        limits: what the record cannot tell, of "matching" or "completions" for instance.
        replaced: the processes that were replaced.
        sources: the texts of the program's files.
        stopped: the signals by which processes are stopped.
        silent_since: when such a process last sent a heartbeat [s].
        waits: what a rank waits in that may still run.
        clocks: of the hosts, where there are several.
        clocks_disagree: why they could not be aligned.

    >>> info = RunInfo(world_size=2, ranks={0: RankInfo("rank 0", host="alpha")})
    >>> info.rank(0).host, info.rank(1).name
    ('alpha', 'rank 1')
    """

    name: str = ""
    world_size: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0
    groups: dict[str, list[Rank]] = {}
    ends: dict[Rank, RankEnd] = {}
    until: Number | None = None
    raising: dict[Rank, Raising] = {}
    unreduced: dict[Rank, list[str]] = {}
    unused: dict[Rank, list[str]] = {}
    unwaited: dict[Rank, list[Count]] = {}
    backend: str = ""
    device: str = ""
    simulated: bool = False
    seed: int | None = None
    terms: Terms = Terms()
    seconds: Number | None = None
    interrupted: bool = False
    ranks: dict[Rank, RankInfo] = {}
    dropped: dict[Rank | Literal["notebook"], Count] = {}
    without_values: dict[Rank | Literal["notebook"], Count] = {}
    threads: dict[Rank, list[str]] = {}
    unseen: dict[Rank, dict[str, Count]] = {}
    limits: dict[str, Limit] = {}
    replaced: list[Replacement] = []
    sources: dict[str, str] = {}
    stopped: dict[Rank, str] = {}
    silent_since: dict[Rank, Number] = {}
    waits: dict[Rank, Wait] = {}
    clocks: dict[str, ClockOffset] = {}
    clocks_disagree: str = ""

    def rank(self, rank: int) -> RankInfo:
        """Facts of a rank; its name at least."""
        known = self.ranks.get(rank, RankInfo())
        return known if known.name else structs.replace(known, name=f"rank {rank}")

    def died(self, rank: int) -> bool:
        """True if the process of a rank died."""
        return rank in self.ends and self.ends[rank].how == "died"
