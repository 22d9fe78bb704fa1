"""Plans a cluster of ranks on several machines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distkit.cluster.gpus import Gpus
from distkit.cluster.plan import Plan, make_plan
from distkit.errors import StartError


@dataclass(frozen=True)
class Machine:
    """A machine, its number of ranks, and its resources as for :func:`make_plan`."""

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
) -> Plan:
    """Plan a cluster of ranks on several machines, as :func:`make_plan` does for one.

    Raises:
        StartError: a machine cannot meet the request; the message names it.
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
    return Plan(
        sum(m.ranks for m in machines),
        servers,
        "nccl" if nccl else "gloo",
        tuple(device for plan in plans for device in plan.devices),
        min(plan.threads for plan in plans),
        f"{where} · {'nccl' if nccl else 'gloo'}",
    )
