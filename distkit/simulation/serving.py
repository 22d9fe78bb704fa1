"""Plays training with a parameter server: synchronous, asynchronous, bounded, with backups. Pure.

A worker pulls from every server, computes, and pushes to every server. Over links, servers and
workers send one message and receive one at a time, so that queues form where they would; on one
host, all share its processors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distkit.simulation.game import Game, Served
from distkit.simulation.hosting import Host, Hosted
from distkit.simulation.network import Link, a_link
from distkit.simulation.stragglers import Delay, Stragglers, constant

Floats = NDArray[np.float64]


def place(tensors: Sequence[int], servers: int) -> Floats:
    """Bytes on each server when whole tensors go to the server that has the fewest so far.

    That is how ``tf_cnn_benchmarks`` places variables: beyond some number of servers the largest
    tensor alone is the heaviest load. A tensor of MXNet's is split: hand in its parts.

    >>> place([8, 4, 3, 2], 2)
    array([8., 9.])
    """
    if servers < 1:
        raise ValueError(f"{servers} servers: at least 1 is needed")
    load = np.zeros(servers)
    for nbytes in tensors:
        load[np.argmin(load)] += nbytes
    return load


def parameter_server(
    workers: int,
    tensors: Sequence[int],
    servers: int,
    link: Link | Host,
    compute: Delay | float,
    *,
    steps: int = 1,
    staleness: float = 0,
    backups: int = 0,
    stragglers: Stragglers | None = None,
    seed: int = 0,
    record: bool = True,
) -> Served:
    """Train with a parameter server until each worker has had its ``steps``.

    Args:
        workers: number of workers; their ranks come first, then the servers'.
        tensors: bytes of each parameter array, placed whole by :func:`place`.
        servers: number of servers.
        link: between workers and servers, or the host whose processes they are.
        compute: seconds of a step's computation, or what draws them.
        steps: of each worker.
        staleness: by how many steps a worker may be ahead of the slowest one: 0 is synchronous
            (``dist_sync``), infinity asynchronous (``dist_async``), between them bounded.
        backups: a synchronous step goes on without the last so many workers; they are told to
            stop.
        stragglers: slow workers.
        seed: of the draws.
        record: whether to write a trace.

    Raises:
        ValueError: no worker, no server, more backups than workers, a negative number …

    Source:
        Li et al., OSDI 2014; Ho et al. (bounded), NIPS 2013; Chen et al. (backups), 2016.

    Example:
        >>> free = Link(0, 0)
        >>> parameter_server(4, [400], 1, free, 1.0, steps=3).seconds
        3.0
    """
    if not isinstance(link, Host):
        a_link(link)
    if workers < 1 or steps < 1:
        raise ValueError(f"{workers} workers, {steps} steps: there must be at least one of each")
    if not 0 <= backups < workers:
        raise ValueError(f"{backups} backups of {workers} workers: leave at least one that counts")
    if staleness < 0 or (backups and staleness):
        raise ValueError(
            f"a staleness of {staleness} with {backups} backups: it is not negative, and backups "
            "are of synchronous training, staleness=0"
        )
    load, rules = place(tensors, servers), (steps, staleness, backups, seed, record)
    game = (
        Hosted(workers, load, link, *rules)
        if isinstance(link, Host)
        else Game(workers, load, link, *rules)
    )
    game.compute = compute if callable(compute) else constant(compute)
    game.slow = (stragglers or Stragglers()).factors(workers)
    return game.play()
