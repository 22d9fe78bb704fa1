"""The metadata of a run, which msgspec reads, validates and writes, and traffic between hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

#: Upper bound for the number of ranks in a trace.
MAX_RANKS = 100_000
#: Upper bound for integers; Python's floats and JavaScript represent all smaller integers exactly.
MAX_INTEGER = 2**53
#: Difference between the first operation numbers of a rank's successive processes.
SEQ_STRIDE = 1 << 32

Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, lt=MAX_INTEGER)]
Integer = Annotated[int, Meta(gt=-MAX_INTEGER, lt=MAX_INTEGER)]
Number = Annotated[float, Meta(gt=-MAX_INTEGER, lt=MAX_INTEGER)]


class RankInfo(Struct, frozen=True, omit_defaults=True):
    """One process of a run.

    Args:
        name: the name in views and messages: "rank 3", "server 0".
        role: "rank", "stage", "worker", "server" or "scheduler"; or "device" for a GPU or host that
            is not a rank.
        host: the name of the machine that the process runs on.
        pid: the process id.
        device: the device that holds the process's tensors.
        file: the file from which the events were imported, if another program recorded them.
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
        how: "returned", "raised" or "died"; "released" after another rank's failure or an
            interrupt; "elsewhere" if the rank is not in a call when the trace ends.
        text: the exception, or why the process exited.
        where: the user's ``file:line``.
        time: time of the end [s], if known.
    """

    how: Literal["returned", "raised", "died", "released", "elsewhere"]
    text: str = ""
    where: str = ""
    time: Number | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the rank was prevented from finishing its program."""
        return self.how not in ("returned", "elsewhere")


class Replacement(Struct, frozen=True):
    """A process that exited and was replaced, and the time of its exit [s]."""

    node: Rank
    name: str
    how: str
    time: Number


class ClockOffset(Struct, frozen=True, omit_defaults=True):
    """Offset of a host's clock from the trace's clock [s].

    Args:
        ahead: the offset, positive if the host's clock is ahead.
        error: maximum error of the host's times, or None if only wall clocks were compared.
    """

    ahead: Number
    error: Number | None = None


class Limitation(Struct, frozen=True, omit_defaults=True):
    """A limit of the recording, and its remedy."""

    text: str
    remedy: str


class Raising(Struct, frozen=True):
    """An exception that has been propagating on a rank since its operation ``seq``."""

    seq: Integer
    text: str
    where: str


class Wait(Struct, frozen=True, array_like=True):
    """Operations ``seqs`` in which a rank waited, from ``since`` until at least ``until`` [s]."""

    seqs: tuple[Integer, ...]
    since: Number
    until: Number


class Consistency(Struct, frozen=True, omit_defaults=True):
    """The consistency model of a parameter server: mode, staleness bound, and backup workers."""

    mode: str = ""
    staleness: Count | None = None
    backup: Count = 0


class RunInfo(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Metadata of a run.

    Args:
        name: the name of the run.
        world_size: the number of ranks, or 0 if unknown.
        groups: the ranks of each process group.
        ends: how each rank ended.
        until: the end of the trace [s].
        raising: the exception that is propagating on each rank.
        unreduced: the DDP parameters that received no gradient, by rank.
        unwaited: the operations on each rank that were never waited for.
        backend: the backend of ``torch.distributed``.
        device: the device type of all ranks.
        simulated: whether the run was simulated.
        seed: the seed for the ranks' random numbers.
        consistency: the consistency model of the parameter server.
        interrupted: whether the user interrupted the run.
        ranks: the processes, including servers and the scheduler.
        dropped: number of events dropped by the bounded buffers, by rank or notebook.
        without_values: number of times that a tensor's values were not recorded, by rank.
        threads: the groups on which several threads of a rank call collectives, by rank.
        unrecorded: number of records missing or not checked, by rank and reason.
        limitations: the limits of the recording, by topic, such as "matching".
        replaced: the processes that were replaced.
        sources: the source code of the program's files.
        waits: the waits of ranks that may still be running.
        clocks: the hosts' clock offsets, if there are several hosts.

    >>> info = RunInfo(world_size=2, ranks={0: RankInfo("rank 0", host="alpha")})
    >>> info.rank(0).host, info.rank(1).name
    ('alpha', 'rank 1')
    """

    name: str = ""
    world_size: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0
    groups: dict[str, list[Rank]] = {}
    ends: dict[Rank, RankEnd] = {}
    until: Number | None = None
    raising: dict[Rank, Raising] = {}
    unreduced: dict[Rank, list[str]] = {}
    unwaited: dict[Rank, list[Count]] = {}
    backend: str = ""
    device: str = ""
    simulated: bool = False
    seed: int | None = None
    consistency: Consistency = Consistency()
    interrupted: bool = False
    ranks: dict[Rank, RankInfo] = {}
    dropped: dict[Rank | Literal["notebook"], Count] = {}
    without_values: dict[Rank | Literal["notebook"], Count] = {}
    threads: dict[Rank, list[str]] = {}
    unrecorded: dict[Rank, dict[str, Count]] = {}
    limitations: dict[str, Limitation] = {}
    replaced: list[Replacement] = []
    sources: dict[str, str] = {}
    waits: dict[Rank, Wait] = {}
    clocks: dict[str, ClockOffset] = {}

    def rank(self, rank: int) -> RankInfo:
        """Return the info of a rank; its name is always set."""
        info = self.ranks.get(rank, RankInfo())
        return info if info.name else structs.replace(info, name=f"rank {rank}")

    @property
    def rank_noun(self) -> str:
        """The noun for a rank: "worker" if the run has servers, and "rank" otherwise."""
        return "worker" if self.rank(0).role == "worker" else "rank"

    def died(self, rank: int) -> bool:
        """Return whether the process of a rank died."""
        return rank in self.ends and self.ends[rank].how == "died"


# -- hosts ------------------------------------------------------------------------

#: Number of messages and bytes for each pair of source and destination host.
Traffic = dict[tuple[str, str], tuple[int, int]]


def hosts_of(info: RunInfo) -> dict[int, str]:
    """Return the host of each rank, if known."""
    return {rank: process.host for rank, process in sorted(info.ranks.items()) if process.host}


def hosts_if_several(info: RunInfo) -> dict[int, str]:
    """Return the host of each rank if there are several hosts; else {}.

    >>> hosts_if_several(RunInfo(ranks={0: RankInfo(host="alpha"), 1: RankInfo(host="alpha")}))
    {}
    """
    hosts = hosts_of(info)
    return hosts if len(set(hosts.values())) > 1 else {}


def traffic(hosts: Mapping[int, str], sums: Iterable[tuple[int, int, int, int]]) -> Traffic:
    """Return the messages and bytes between hosts.

    Args:
        hosts: the host of each rank; messages to or from other ranks are ignored.
        sums: tuples of sender, receiver, number of messages and number of bytes.

    >>> traffic({0: "alpha", 1: "alpha", 2: "beta"}, [(0, 1, 1, 8), (1, 2, 1, 4), (0, 2, 1, 4)])
    {('alpha', 'alpha'): (1, 8), ('alpha', 'beta'): (2, 8)}
    """
    by_pair: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for src, dst, messages, nbytes in sums:
        if src in hosts and dst in hosts:
            totals = by_pair[hosts[src], hosts[dst]]
            totals[0] += messages
            totals[1] += nbytes
    return {pair: (messages, nbytes) for pair, (messages, nbytes) in sorted(by_pair.items())}


def cross_host_traffic(by_pair: Traffic) -> tuple[int, int]:
    """Return the messages and bytes sent between different hosts."""
    cross_host = [totals for (src, dst), totals in by_pair.items() if src != dst]
    return sum(messages for messages, _ in cross_host), sum(nbytes for _, nbytes in cross_host)


def clock_error(info: RunInfo) -> float | None:
    """Return the maximum error when times on two hosts are compared [s].

    The result is None if a host's clock was not measured, or if there is only one host.
    """
    errors = [clock.error for clock in info.clocks.values() if clock.error is not None]
    is_known = errors and len(errors) == len(info.clocks) and hosts_if_several(info)
    return sum(sorted(errors)[-2:]) if is_known else None
