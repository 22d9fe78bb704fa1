"""The library's answers to the exercises of training, of machines, GPUs and the parameter server.

The real server is kvstore/server.py; all gradients' mean is in algorithms/sgd.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


def mean_loss(losses: Tensor) -> Tensor:
    """The mean over all ranks' examples: sums and numbers are added, and divided once."""
    both = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
    dist.all_reduce(both)
    return both[0] / both[1]


def average_gradients(gradients: list[Tensor]) -> None:
    """All gradients travel in one tensor, as in DDP's buckets."""
    whole = torch.cat(gradients)
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for gradient, mean in zip(gradients, whole.split([len(g) for g in gradients]), strict=True):
        gradient.copy_(mean)


def clip_gradients(gradients: Tensor, most: float) -> None:
    """The norm that counts is that of the mean: every rank computes the same one."""
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()
    gradients *= min(1.0, most / gradients.norm().item())


def staged(x: Tensor) -> None:
    """An all-reduce through the memory of the host, by a backend that cannot reach x's device."""
    host = x.to("cpu", copy=True)
    dist.all_reduce(host)
    x.copy_(host)


def stop_together(loss: Tensor, limit: float) -> bool:
    """What every rank knows decides: the mean of all losses."""
    total = loss.clone()
    dist.all_reduce(total)
    return bool(total / dist.get_world_size() < limit)


@dataclass
class Server:
    """The state of a server with one key, for ``dk.check.push_handler``.

    ``sync``: as ``dist_sync``, else as ``dist_async``. ``workers``: how many there are.
    ``waiting``: the workers whose pulls have no answer yet; whoever answers them takes them off.
    ``inbox``: gradients that wait for their round, by worker. ``seen``: the (worker, number) of
    pushes that were accepted.
    """

    sync: bool
    workers: int
    value: Tensor
    updates: int = 0
    waiting: list[int] = field(default_factory=list)
    inbox: dict[int, Tensor] = field(default_factory=dict)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def update(self, gradient: Tensor | int) -> None:
        """The optimizer's step, with learning rate −1: the value shows what was added."""
        self.value = self.value + gradient
        self.updates += 1


def push_handler(server: Server, worker: int, number: int, gradient: Tensor) -> list[int]:
    """A push has arrived. Returns the workers whose waiting pulls are answered now."""
    if (worker, number) in server.seen:  # its answer was lost, so it came again
        return []
    server.seen.add((worker, number))

    server.inbox[worker] = gradient
    if server.sync and len(server.inbox) < server.workers:
        return []  # somebody is missing in this round

    server.update(sum(server.inbox.values()))
    server.inbox.clear()  # the next round begins

    answered, server.waiting = server.waiting, []  # no pull is answered twice
    return answered


def waits_for(worker: int, clocks: Mapping[int, int], bound: int) -> set[int]:
    """The workers that a pull waits for: those more than ``bound`` gradients behind."""
    return {other for other, clock in clocks.items() if clock < clocks[worker] - bound}


def staleness_bound(step: float, pause: float) -> int:
    """While one worker pauses the others make ``pause / step`` gradients, rounded up."""
    return math.ceil(pause / step)


def round_ends(arrivals: Sequence[float], backup: int) -> float:
    """The last gradient that the round needs completes it."""
    return sorted(arrivals)[len(arrivals) - backup - 1]


def counted_once(pushes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """A push is known if it was applied, or if its worker has settled it."""
    seen, settled, applied = set[tuple[int, int]](), dict[int, int](), []
    for worker, number, below in pushes:
        if (worker, number) not in seen and number >= settled.get(worker, 0):
            applied.append((worker, number, below))
            seen.add((worker, number))
        settled[worker] = max(settled.get(worker, 0), below)
    return applied


def best_order(hosts: Sequence[str]) -> list[int]:
    """Ranks of the same machine beside each other, so that each machine has one way out."""
    return sorted(range(len(hosts)), key=lambda rank: hosts[rank])


def bytes_between(hosts: Sequence[str], nbytes: int) -> float:
    """Who has its right neighbour on another machine sends all its messages there."""
    n = len(hosts)
    crossings = sum(hosts[rank] != hosts[(rank + 1) % n] for rank in range(n))
    return crossings * 2 * (n - 1) * nbytes / n
