"""Plan a cluster of ranks on several machines. No side effects."""

from __future__ import annotations

from collections.abc import Mapping

from distkit.cluster.plan import Plan


def combine(plans: Mapping[str, Plan]) -> Plan:
    """Return the plan of a cluster, given the plan of each of its machines."""
    backend = "nccl" if all(plan.backend == "nccl" for plan in plans.values()) else "gloo"
    devices = tuple(device for plan in plans.values() for device in plan.devices)
    notes = [", ".join(f"{plan.ranks} on {name}" for name, plan in plans.items())]
    if {*devices} != {"cpu"}:
        notes += [
            f"{name}: {', '.join(dict.fromkeys(plan.devices))}"
            + (f", {plan.note}" if plan.backend == "gloo" else "")
            for name, plan in plans.items()
        ]
    return Plan(
        sum(plan.ranks for plan in plans.values()),
        sum(plan.servers for plan in plans.values()),
        backend,
        devices,
        min(plan.threads for plan in plans.values()),
        " · ".join([*notes, backend]),
    )
