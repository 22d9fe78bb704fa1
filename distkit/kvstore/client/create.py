"""Creation of a worker's store, one per run, and its release at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

from distkit.errors import KVStoreError
from distkit.kvstore.client.requests import Call, Requests
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.messages import LIFE, AddressBook, Register
from distkit.kvstore.protocol.options import BIGARRAY_BOUND, StoreOptions
from distkit.kvstore.transport.link import Link
from distkit.kvstore.transport.node import Node

_here: Node | None = None
_store: KVStore | None = None
_options: StoreOptions | None = None  # options of _store
_report: Callable[[str], None]


def create(
    name: str,
    *,
    bigarray_bound: int = BIGARRAY_BOUND,
    staleness: int | None = None,
    backup: int = 0,
    replication: int = 1,
    on_crash: str = "halt",
) -> KVStore:
    """Create a store by name; every worker of a run creates the same one.

    Args:
        name: ``"dist_sync"``: servers wait for every worker's gradient, and update with their sum.
            ``"dist_async"``: servers update with each gradient as it arrives; no worker waits.
            ``"dist_sync_device"``, ``"dist_async_device"``: the same, but the gradients of a
            worker's devices are added on a device.
        bigarray_bound: number of elements from which an array is split over all servers.
        staleness: for dist_async: the number of gradients by which a worker may be ahead of the
            slowest; beyond it, its pulls wait (bounded staleness). None: no limit.
        backup: for dist_sync: the number of workers that a round does not wait for; gradients
            that arrive too late are dropped (``kv.dropped`` counts them).
        replication: 2 for a backup of each server's values on another server: one server may
            crash, and no acknowledged push is lost. 1 for no backup.
        on_crash: for dist_sync, the effect of a worker's crash. ``"halt"``: workers that wait for
            it get an error that names it; with ``backup`` only if too many have ended.
            ``"continue"``: the others continue without it, with sums of fewer gradients.
            ``"replace"``: they wait for a replacement, which a ``dk.Cluster`` starts immediately;
            it runs the function from the start and pulls the current values. With dist_async a
            replacement is also started, but no worker waits.

    Raises:
        KVStoreError: The name is unknown, the cluster has no servers, or other workers passed
            other options.
    """
    global _store, _options
    options = StoreOptions(name, bigarray_bound, staleness, backup, replication, on_crash)
    node = _check(name)
    options.fit(node.workers, node.servers)
    if _store is None:
        _report(options.crash_effect)  # before registering: a worker may end at any time
        _store, _options = _join(node, options), options
    if _options != options:
        raise KVStoreError(
            f"worker {node.index} already has a store {_options} in this run, and requests "
            f"{options}. Create the same store in the whole run."
        )
    return _store


def _check(name: str) -> Node:
    """Return this process's node in a cluster with servers."""
    if _here is None or not _here.servers:
        raise KVStoreError(
            f'a "{name}" store needs a cluster with servers, and this process is not a worker of '
            "one. Start a cluster with dk.Cluster(workers=4, servers=2), "
            "and call kvstore.create inside the function that it runs."
        )
    return _here


def _join(node: Node, options: StoreOptions) -> KVStore:
    """Register with the scheduler, wait for all nodes, and connect to the servers."""
    link, servers = Link(node.keys, node.way), range(node.workers, node.scheduler)
    requests = Requests(
        link,
        node.id,
        first=LIFE * node.life,
        name=node.name,
        servers=servers,
        replication=options.replication,
    )
    link.connect(node.scheduler, node.endpoint(node.scheduler))
    (book,) = requests.ask([Call(node.scheduler, Register, ("", options))])
    assert isinstance(book, AddressBook)
    for server in servers:
        if server in book.endpoints:
            link.connect(server, book.endpoints[server])
        else:
            requests.depart(server, "before this worker started")
    return KVStore(
        requests,
        type=options.mode,
        num_workers=node.workers,
        servers=servers,
        scheduler=node.scheduler,
        bound=options.bound,
        replaces=options.on_crash == "replace",
        barriers=book.barriers,
        giver=min(n for n in book.endpoints if n < node.workers),
    )


def use(node: Node, report: Callable[[str], None] = lambda crash_effect: None) -> None:
    """Make this process a worker of a cluster, until :func:`release`.

    Args:
        node: its identity in the cluster.
        report: called when a store is created, with the effect of a worker's end on the run, as
            in ``on_crash``.
    """
    global _here, _report
    _here, _report = node, report


def here() -> Node | None:
    """Return this process's node in its cluster during a run; None if it is not a worker."""
    return _here


def release(*, flush: bool = True) -> None:
    """Close this process's store at the end of a run.

    Args:
        flush: whether to wait until the pushes have arrived; False for a run that was interrupted
            or failed.

    Raises:
        KVStoreError: A push was rejected, and no earlier call has raised its error.
    """
    global _here, _store
    store, _here, _store = _store, None, None
    if store is not None:
        store.close(flush=flush)
