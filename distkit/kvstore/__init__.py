"""The parameter server: weights on servers, workers that pull them and push gradients.

Three roles: *workers* train, *servers* hold the weights, one *scheduler* introduces everybody
to everybody. On each worker::

    kv = kvstore.create("dist_sync")
    kv.init("w", w)
    kv.set_optimizer(kvstore.SGD(learning_rate=0.1))
    for inputs, targets in shard:
        w = kv.pull("w")
        kv.push("w", gradient(w, inputs, targets))

Read on in :mod:`distkit.kvstore.server`, then :mod:`~distkit.kvstore.scheduler`, then
:mod:`~distkit.kvstore.worker`. Source: Li et al., Scaling distributed machine learning with the
parameter server, 2014; the names are Apache MXNet's.
"""

from __future__ import annotations

from distkit.errors import KVStoreError
from distkit.kvstore.local import LocalLink
from distkit.kvstore.messages import AddressBook, Register
from distkit.kvstore.node import Node
from distkit.kvstore.optimizer import SGD
from distkit.kvstore.placement import BIGARRAY_BOUND, Part
from distkit.kvstore.requests import Call, Requests
from distkit.kvstore.shard import MODES
from distkit.kvstore.transport import Service, ZmqLink
from distkit.kvstore.worker import KVStore

__all__ = ["SGD", "KVStore", "Node", "Part", "Service", "create", "release", "serve", "use"]

_here: Node | None = None
_store: KVStore | None = None


def create(name: str = "local", *, bigarray_bound: int = BIGARRAY_BOUND) -> KVStore:
    """A store of this name, the same on every worker of the run.

    Args:
        name: ``"local"``: in this process alone. ``"dist_sync"``: servers wait for every
            worker's gradient, sum them, update once. ``"dist_async"``: servers update with each
            gradient as it comes; nobody waits.
        bigarray_bound: number of elements from which an array is split over all servers.

    Raises:
        KVStoreError: no such name, no cluster with servers, or other workers chose otherwise.

    >>> create("local")
    <KVStore local: worker 0 of 1>
    """
    global _store
    if name == "local":
        local = Requests(LocalLink(), 0, 0, local=True)
        return KVStore(local, type=name, num_workers=1, servers=[0], scheduler=None,
                       bound=bigarray_bound)  # fmt: skip
    node = _check(name)
    if _store is None:
        _store = _join(node, name, bigarray_bound)
    if (_store.type, _store.bigarray_bound) != (name, bigarray_bound):
        raise KVStoreError(
            f'worker {node.index} has a "{_store.type}" store (bigarray_bound '
            f'{_store.bigarray_bound}) in this run and asks for "{name}" ({bigarray_bound}). '
            "Use one kind per run."
        )
    return _store


def _check(name: str) -> Node:
    """The place of this process in a cluster that can have such a store."""
    if name not in MODES:
        names = ", ".join(f'"{n}"' for n in ("local", *MODES))
        raise KVStoreError(f'there is no "{name}" store. There are: {names}.')
    if _here is None or not _here.servers:
        raise KVStoreError(
            f'a "{name}" store needs a cluster with servers, and this is no worker of one: '
            "start one with dk.Cluster(workers=4, servers=2) "
            "and call kvstore.create inside the function that it runs."
        )
    return _here


def _join(node: Node, name: str, bound: int) -> KVStore:
    """Register with the scheduler, wait for everybody, and connect to the servers."""
    link = ZmqLink()
    requests = Requests(link, node.run, node.id)
    try:
        link.connect(node.scheduler, node.endpoint(node.scheduler))
        me = ("", node.workers, node.servers, name, bound)
        (book,) = requests.ask([Call(node.scheduler, Register, me)])
        assert isinstance(book, AddressBook)
        servers = range(node.workers, node.scheduler)
        for server in servers:
            link.connect(server, book.endpoints[server])
    except BaseException:
        requests.close()
        raise
    return KVStore(requests, type=name, num_workers=node.workers, servers=servers,
                   scheduler=node.scheduler, bound=bound)  # fmt: skip


def use(node: Node) -> None:
    """Make this process a worker of a cluster, for the run that ``node`` names.

    What is left of an earlier run is closed.
    """
    global _here
    release(flush=False)
    _here = node


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


def serve(node: Node) -> Service:
    """A server or the scheduler: call ``run()`` on it, and ``stop()`` from any thread."""
    return Service(node)
