"""Plans a cluster before anything starts: the number of ranks and servers, devices and backend.

No side effects: it computes a plan from the machine's resources, or raises :class:`StartError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from distkit._format import count, human_bytes
from distkit.cluster.gpus import Gpus, assign_devices
from distkit.errors import StartError

#: Memory per additional rank [bytes]: torch is shared by fork, and small tensors are included.
RANK_BYTES = 90_000_000

#: Default number of ranks.
DEFAULT_RANKS = 4

#: Recommended maximum number of processes per core; more start slowly and wait for the core.
PROCESSES_PER_CORE = 8


@dataclass(frozen=True)
class Plan:
    """The plan of a cluster.

    ``devices`` contains torch's name of each rank's device; ``note`` explains the backend on the
    status card; ``oversubscription_warning`` describes the effect of too few cores.
    """

    ranks: int
    servers: int
    backend: str
    devices: tuple[str, ...]
    threads: int
    note: str = ""
    oversubscription_warning: str = ""

    @property
    def processes(self) -> int:
        """Number of processes: ranks, servers, and the scheduler that servers need."""
        return self.ranks + self.servers + (1 if self.servers else 0)

    @property
    def description(self) -> str:
        """Summary of the processes."""
        if self.servers:
            servers = count(self.servers, "server")
            return f"{count(self.ranks, 'worker')}, {servers}, 1 scheduler"
        return count(self.ranks, "rank")


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
) -> Plan:
    """Choose devices, backend and threads.

    Args:
        ranks: number of ranks (workers, with servers).
        servers: number of parameter servers.
        device: "auto", "cpu", "cuda" or "cuda:1".
        backend: "auto", "gloo" or "nccl".
        cpus: number of usable processors.
        memory: memory available to new processes [bytes].
        gpus: the machine's GPUs; None if it has none.
        threads: torch threads per rank; None to share the processors equally.

    Raises:
        StartError: the request cannot be met; the message names what is available.
    """
    check_counts(ranks, servers)
    _check_memory(ranks, servers, memory, cpus)
    devices, backend, note = assign_devices(ranks, gpus or Gpus(), device, backend)
    if threads is None:
        threads = max(1, cpus // (ranks + servers))
    return Plan(
        ranks,
        servers,
        backend,
        devices,
        threads,
        note,
        oversubscription_warning=_warn_oversubscribed(ranks + servers, cpus),
    )


def _warn_oversubscribed(processes: int, cpus: int) -> str:
    """Return a warning if the processes oversubscribe the cores; else ""."""
    limit = PROCESSES_PER_CORE * cpus
    if processes <= limit:
        return ""
    return (
        f"{processes} processes share {count(cpus, 'core')}: they start slowly and take turns to "
        f"compute, so timings are unreliable. Use at most {limit} here, and "
        "dk.simulation.simulate for more ranks."
    )


def check_counts(ranks: int, servers: int) -> None:
    """Validate the numbers of ranks and servers.

    Raises:
        StartError: a number is not an integer, or is too small.
    """
    counts = ("ranks", ranks, "1 rank"), ("servers", servers, "0 servers")
    for name, n, minimum in counts:
        if not isinstance(n, int) or isinstance(n, bool):
            raise StartError(f"{name} must be an integer, not {n!r}. Try dk.Cluster(4).")
        if n < int(minimum[0]):
            raise StartError(f"a cluster needs at least {minimum}; got {n}. Try dk.Cluster(4).")


def _check_memory(ranks: int, servers: int, memory: int, cpus: int) -> None:
    processes = ranks + servers + (1 if servers else 0)
    fit = max(0, memory // RANK_BYTES)
    if processes > fit:
        suggestion = min(fit, PROCESSES_PER_CORE * cpus)
        remedy = f"Use dk.Cluster({suggestion})" if fit else "Stop other programs or clusters"
        raise StartError(
            f"{processes} processes need about {human_bytes(processes * RANK_BYTES)} of "
            f"memory, and {human_bytes(memory)} is free: {fit} fit. {remedy}."
        )
