"""Deciding, before anything starts: how many ranks of which role, on which device and backend.

Pure: the machine's numbers come in, a plan or a :class:`StartError` comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distkit._format import count, human_bytes
from distkit.cluster.gpus import Gpus, Seat, Wanted, seat_ranks
from distkit.errors import StartError

#: What one more rank takes, with torch shared by fork and room for small work [bytes].
RANK_BYTES = 90_000_000

#: The number of ranks of a cluster when nobody says how many.
DEFAULT = 4

#: So many processes a core start within seconds and take turns without long waits.
COMFORTABLE = 8

#: A node of the parameter server that sends no heartbeat for this long counts as dead [s].
HEARTBEAT_TIMEOUT = 30.0


@dataclass(frozen=True)
class Plan:
    """The plan of a cluster.

    ``seats`` has one entry per rank; ``note`` says why this backend, for the status card;
    ``crowd`` what to expect where processes have few cores, or no room on a GPU; ``far`` are
    the arguments of ``dk.Cluster`` that tell other machines.
    """

    ranks: int
    servers: int
    backend: str
    seats: tuple[Seat, ...]
    threads: int
    note: str = ""
    crowd: str = ""
    far: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank, as it names it."""
        return tuple(seat.device for seat in self.seats)

    @property
    def processes(self) -> int:
        """Ranks, servers, and the scheduler that comes with servers."""
        return self.ranks + self.servers + (1 if self.servers else 0)

    @property
    def what(self) -> str:
        """What there is, in words."""
        if self.servers:
            servers = count(self.servers, "server")
            return f"{count(self.ranks, 'worker')}, {servers}, 1 scheduler"
        return count(self.ranks, "rank")

    @property
    def wish(self) -> str:
        """The arguments of ``dk.Cluster(…)`` for another one like it."""
        ranks = f"workers={self.ranks}" if self.servers else str(self.ranks)
        of_ranks = [] if self.far.startswith("hosts=") else [ranks]
        of_servers = [f"servers={self.servers}"] if self.servers else []
        return ", ".join([*of_ranks, *of_servers, *([self.far] if self.far else [])])


def make_plan(
    ranks: int,
    servers: int,
    device: str,
    backend: str,
    *,
    cpus: int,
    memory: int,
    gpus: Gpus | None = None,
    threads: int | None = None,
    memory_fraction: float | None = None,
) -> Plan:
    """Decide on devices, backend and threads.

    Args:
        ranks: how many ranks (workers, when there are servers).
        servers: how many parameter servers.
        device: "auto", "cpu", "cuda" or "cuda:1".
        backend: "auto", "gloo" or "nccl".
        cpus: processors that may be used.
        memory: bytes that new processes may take.
        gpus: what there is of GPUs; None for nothing.
        threads: torch threads per rank; as many as the processors give when None.
        memory_fraction: of its GPU's memory that a rank may take.

    Raises:
        StartError: what was asked for is not to be had; the message says what is.
    """
    check_counts(ranks, servers)
    _check_memory(ranks, servers, memory, cpus)
    wanted = Wanted(device, backend, memory_fraction)
    seats, backend, note = seat_ranks(ranks, wanted, gpus or Gpus())
    if threads is None:
        threads = max(1, cpus // (ranks + servers))
    full = device == "auto" and gpus is not None and gpus.usable and not seats[0].gpu
    crowd = "\n".join(filter(None, [_crowd(ranks + servers, cpus), note if full else ""]))
    return Plan(ranks, servers, backend, seats, threads, note, crowd)


@dataclass(frozen=True)
class Machine:
    """A machine that ranks are to be on: how many, and what it has, as for :func:`make_plan`."""

    name: str
    ranks: int
    cpus: int
    memory: int
    gpus: Gpus
    servers: int = 0


def plan_for_machines(
    machines: Sequence[Machine],
    servers: int,
    device: str,
    backend: str,
    threads: int | None,
    memory_fraction: float | None = None,
) -> Plan:
    """Decide for ranks on several machines, as :func:`make_plan` does for those of one.

    Raises:
        StartError: a machine, which is named, cannot have what was asked of it.
    """
    plans = []
    for m in machines:
        try:
            plans.append(
                make_plan(
                    m.ranks,
                    m.servers,
                    device,
                    backend,
                    cpus=m.cpus,
                    memory=m.memory,
                    gpus=m.gpus,
                    threads=threads,
                    memory_fraction=memory_fraction,
                )
            )
        except StartError as error:
            raise StartError(f"on {m.name}: {error}") from error
    nccl = all(plan.backend == "nccl" for plan in plans)
    where = ", ".join(f"{m.ranks} on {m.name}" for m in machines)
    if servers:
        where += " · servers on " + ", ".join(m.name for m in machines if m.servers)
    if any(device != "cpu" for plan in plans for device in plan.devices):
        where += "".join(
            f" · {m.name}: {', '.join(dict.fromkeys(p.devices))}"
            + (f", {p.note}" if p.backend == "gloo" else "")
            for m, p in zip(machines, plans, strict=True)
        )
    crowds = [f"{m.name}: {p.crowd}" for m, p in zip(machines, plans, strict=True) if p.crowd]
    return Plan(
        sum(m.ranks for m in machines),
        servers,
        "nccl" if nccl else "gloo",
        tuple(seat for plan in plans for seat in plan.seats),
        min(plan.threads for plan in plans),
        f"{where} · {'nccl' if nccl else 'gloo'}",
        "\n".join(crowds),
    )


def _crowd(processes: int, cpus: int) -> str:
    """A warning for more processes than the machine serves well; "" for fewer."""
    most = COMFORTABLE * cpus
    if processes <= most:
        return ""
    return (
        f"{processes} processes share {count(cpus, 'core')}: they start slowly and take turns to "
        f"compute, so measured times say little. Use up to {most} here, and "
        "dk.simulation.simulate for more ranks."
    )


def check_counts(ranks: int, servers: int) -> None:
    """See whether these can be numbers of processes.

    Raises:
        StartError: one is no whole number, or too small.
    """
    counts = ("ranks", ranks, "1 rank"), ("servers", servers, "0 servers")
    for name, n, least in counts:
        if not isinstance(n, int) or isinstance(n, bool):
            raise StartError(f"{name} must be a whole number, not {n!r}. Try dk.Cluster(4).")
        if n < int(least[0]):
            raise StartError(f"a cluster needs at least {least}; got {n}. Try dk.Cluster(4).")


def _check_memory(ranks: int, servers: int, memory: int, cpus: int) -> None:
    wanted = ranks + servers + (1 if servers else 0)
    fit = max(0, memory // RANK_BYTES)
    if wanted > fit:
        good = min(fit, COMFORTABLE * cpus)
        remedy = f"Use dk.Cluster({good})" if fit else "Stop other programs or clusters"
        raise StartError(
            f"{wanted} processes need about {human_bytes(wanted * RANK_BYTES)} and "
            f"{human_bytes(memory)} of memory is free: {fit} fit. {remedy}."
        )
