"""Determine the machines that a call or a site requests, and the number of ranks on each.

A site sets the environment variable ``DISTKIT_CLUSTER`` to a JSON object with arguments of
``dk.Cluster``. Notebooks need no changes: ``dk.Cluster(4)`` then uses the site's machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from distkit.cluster.plan import DEFAULT_RANKS, check_counts
from distkit.errors import StartError
from distkit_hosts.remote import launching
from distkit_hosts.remote.fleet import HostRequest

Hosts = Mapping[str, int] | Sequence[str]


def request(
    ranks: int | None,
    hosts: Hosts | None,
    engines: str,
    options: Mapping[str, Any],
    site: str = "",
    **fields: Any,
) -> HostRequest:
    """Return the request for a call to ``dk.Cluster``.

    Args:
        ranks: total number of ranks; None if not given.
        hosts: the machines passed to the call, or the number of ranks on each.
        engines: the launcher passed to the call; "" if not given.
        options: the launcher options passed to the call.
        site: the site's arguments as JSON, used if the call names no machines or launcher.
        **fields: further fields of the request, which the site's arguments may replace.

    Raises:
        StartError: the arguments are contradictory, or ``site`` is invalid.

    >>> request(4, None, "", {}, '{"hosts": ["alpha", "beta", "gamma"]}').ranks
    {'alpha': 2, 'beta': 1, 'gamma': 1}
    >>> request(4, None, "", {}, '{"engines": "slurm", "qos": "low"}').options
    {'qos': 'low'}
    """
    options = {**options}
    if hosts is None and not engines:
        options = _decode(site) | options
        hosts, engines = options.pop("hosts", None), options.pop("engines", "")
    engines = engines or "ssh"
    fields |= {name: options.pop(name) for name in fields if name in options}
    if hosts is None:
        if engines == "ssh":
            raise StartError(
                "engines='ssh' needs machines: dk.Cluster(hosts={'alpha': 2, 'beta': 2})."
            )
        return HostRequest(
            DEFAULT_RANKS if ranks is None else ranks, engines, options=options, **fields
        )
    counts = _counts(ranks, hosts)
    if engines == "ssh":
        return HostRequest(counts, engines, options=options, **fields)
    if engines == "mpi":
        options["mpi_hosts"] = counts
        return HostRequest(sum(counts.values()), engines, options=options, **fields)
    raise StartError(
        f"hosts applies only to engines='ssh' and 'mpi'; {engines!r} selects the machines itself. "
        "Leave out hosts, or use the launcher's options, such as Slurm's "
        "options='--nodelist=alpha,beta'."
    )


def attached(cluster: Any, **fields: Any) -> HostRequest:
    """Return the request for the engines of an existing cluster, given its client or profile."""
    client = launching.connect(cluster) if isinstance(cluster, str) else cluster
    return HostRequest(len(client.ids), "", client, **fields)


def _counts(ranks: int | None, hosts: Hosts) -> dict[str, int]:
    if isinstance(hosts, Mapping):
        if ranks is not None:
            raise StartError(
                "pass ranks or a number for each machine, not both: "
                "dk.Cluster(hosts={'alpha': 2}), or dk.Cluster(2, hosts=['alpha', 'beta'])."
            )
        counts = dict(hosts)
    else:
        check_counts(DEFAULT_RANKS if ranks is None else ranks, 0)
        counts = distribute(DEFAULT_RANKS if ranks is None else ranks, list(hosts))
    wrong = [name for name, n in counts.items() if not isinstance(n, int) or n < 1]
    if not counts or wrong:
        raise StartError(
            f"hosts={hosts!r}: expected at least one machine, with at least one rank each: "
            "hosts={'alpha': 2}."
        )
    return counts


def distribute(ranks: int, hosts: Sequence[str]) -> dict[str, int]:
    """Distribute ranks in blocks over machines, in order; omit machines without ranks.

    >>> distribute(7, ["alpha", "beta", "gamma"])
    {'alpha': 3, 'beta': 2, 'gamma': 2}
    >>> distribute(1, ["alpha", "beta"])
    {'alpha': 1}
    """
    quotient, remainder = divmod(ranks, len(hosts) or 1)
    return {name: n for i, name in enumerate(hosts) if (n := quotient + (i < remainder))}


def _decode(site: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(site, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise StartError(
            f"DISTKIT_CLUSTER={site!r} is not a JSON object ({error}). Set it to arguments of "
            'dk.Cluster, such as \'{"engines": "slurm", "account": "physics"}\'.'
        ) from None
