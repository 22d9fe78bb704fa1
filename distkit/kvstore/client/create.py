"""Makes the store of a worker, and closes it when the run is over: one for each run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from distkit.errors import KVStoreError
from distkit.gone import refuse
from distkit.kvstore.client.requests import Call, Requests
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.messages import LIFE, AddressBook, Register
from distkit.kvstore.protocol.terms import BIGARRAY_BOUND, Terms, canonical
from distkit.kvstore.transport.link import LocalLink, ZmqLink
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.sockets import BROKEN

_here: Node | None = None
_store: KVStore | None = None
_terms: Terms | None = None  # of _store
_report: Callable[[str], None]


def create(
    name: str = "local",
    *,
    bigarray_bound: int = BIGARRAY_BOUND,
    staleness: int | None = None,
    backup: int = 0,
    replication: int = 1,
    on_crash: str = "halt",
    **unknown: Any,
) -> KVStore:
    """A store of this name, the same on every worker of the run.

    Args:
        name: ``"local"``: in this process alone. ``"device"``: the same, on the device of its
            tensors. ``"dist_sync"``: servers wait for every worker's gradient, sum them, update
            once. ``"dist_async"``: servers update with each gradient as it comes; nobody waits.
            ``"dist_sync_device"``, ``"dist_async_device"``: the same; gradients of a worker's
            several devices are added on a device. MXNet's other spellings, such as
            ``"dist_device_sync"``, are known.
        bigarray_bound: number of elements from which an array is split over all servers.
        staleness: with dist_async: by how many gradients a worker may be ahead of the slowest;
            its pulls wait when it is further (bounded staleness). None: any number.
        backup: with dist_sync: how many of the workers a round does not wait for; their
            gradients are dropped when they come too late (``kv.dropped`` counts them).
        replication: 2 for a backup of each server's values on another: one server may crash, and
            no acknowledged push is lost. 1: none.
        on_crash: with dist_sync, when a worker crashes: ``"halt"``: the others get an error that
            names it, when they wait for it in vain: with ``backup`` only if too many have ended.
            ``"continue"``: they go on without it; the sum is of fewer gradients.
            ``"replace"``: they wait until another has its place. A ``dk.Cluster`` starts it at
            once: it runs the function again from its beginning, and pulls what is there. With
            dist_async, too, where nobody waits.
        unknown: refused.

    Raises:
        KVStoreError: no such name, no cluster with servers, or other workers chose otherwise.
        TypeError: no such option.

    >>> create("local")
    <KVStore local: worker 0 of 1>
    """
    global _store, _terms
    refuse("kvstore.create", unknown)
    if not isinstance(name, str):
        raise KVStoreError(f'create got {name!r:.60}. Give a name such as "dist_sync".')
    spelled, name = name.lower(), canonical(name)
    if name in ("local", "device"):
        _hint(name)
        local = Requests(LocalLink(), 0, local=True, servers=[0])
        return KVStore(
            local, type=spelled, num_workers=1, servers=[0], scheduler=None, bound=bigarray_bound
        )
    terms = Terms(name, bigarray_bound, staleness, backup, replication, on_crash)
    node = _check(name)
    terms.fit(node.workers, node.servers)
    if _store is None:
        _report(terms.aftermath)  # first: whoever is there may end any time
        _store, _terms = _join(node, terms, spelled), terms
    if _terms != terms:
        raise KVStoreError(
            f"worker {node.index} has a store {_terms} in this run and asks for {terms}. "
            "Use one kind per run."
        )
    return _store


def _hint(name: str) -> None:
    """A store of one process in a cluster with servers is hardly meant."""
    if _here is not None and _here.servers:
        warnings.warn(
            f'a "{name}" store is each worker\'s own, and this cluster has servers: '
            'kvstore.create("dist_sync") is shared by its workers.',
            stacklevel=3,
        )


def _check(name: str) -> Node:
    """The place of this process in a cluster that can have such a store."""
    if _here is None or not _here.servers:
        raise KVStoreError(
            f'a "{name}" store needs a cluster with servers, and this process is not one of its '
            "workers: start one with dk.Cluster(workers=4, servers=2) "
            "and call kvstore.create inside the function that it runs."
        )
    return _here


def _join(node: Node, terms: Terms, spelled: str) -> KVStore:
    """Register with the scheduler, wait for everybody, and connect to the servers."""
    link, servers = ZmqLink(node.keys, node.way), range(node.workers, node.scheduler)
    requests = Requests(
        link,
        node.id,
        first=LIFE * node.life,
        name=node.name,
        scheduler=node.scheduler,
        servers=servers,
        replication=terms.replication,
    )
    try:
        link.connect(node.scheduler, node.endpoint(node.scheduler))
        me = ("", terms, os.getpid())
        (book,) = requests.ask([Call(node.scheduler, Register, me)])
        assert isinstance(book, AddressBook)
        for server in servers:
            if server in book.endpoints:
                link.connect(server, book.endpoints[server])
            else:
                requests.depart(server, BROKEN)  # before this worker began
    except BaseException:
        requests.close()
        raise
    requests.clocks = terms.backup > 0
    return KVStore(
        requests,
        type=spelled,
        num_workers=node.workers,
        servers=servers,
        scheduler=node.scheduler,
        bound=terms.bound,
        replaces=terms.on_crash == "replace",
        barriers=book.barriers,
        giver=min(n for n in book.endpoints if n < node.workers),
    )


def use(node: Node, report: Callable[[str], None] = lambda aftermath: None) -> None:
    """Make this process a worker of a cluster, until :func:`release`.

    Args:
        node: its place.
        report: called when a store is created: what becomes of its run when a worker ends, as
            ``on_crash`` says.
    """
    global _here, _report
    _here, _report = node, report


def here() -> Node | None:
    """This process's place in its cluster during a run; None if it has none."""
    return _here


def release(*, flush: bool = True) -> None:
    """End this process's part in the run: close its store.

    Args:
        flush: first wait until the pushes have arrived. Without, it returns at once: for a run
            that was interrupted or failed.

    Raises:
        KVStoreError: a push was refused and no call has told yet.
    """
    global _here, _store
    store, _here, _store = _store, None, None
    if store is not None:
        store.close(flush=flush)
