"""The KVStore of a worker, for training code; a worker creates one per run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.client.requests import MAX_QUEUED, Call, Requests
from distkit.kvstore.client.tensors import (
    Keys,
    Traffic,
    Values,
    concatenate,
    group_by_key,
    host_copy,
    key_list,
    slice_part,
    sum_devices,
    write,
)
from distkit.kvstore.protocol.compression import Compression
from distkit.kvstore.protocol.messages import (
    INCARNATION_STRIDE,
    Assign,
    AtBarrier,
    Barrier,
    Finished,
    Init,
    Key,
    Note,
    Pull,
    Push,
    Register,
    Reply,
    SetOptimizer,
)
from distkit.kvstore.protocol.optimizer import spec_of
from distkit.kvstore.protocol.options import BIGARRAY_BOUND, StoreOptions
from distkit.kvstore.protocol.placement import Layout, Part, dtype_name, parts_of
from distkit.kvstore.transport.link import Link
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.recording import Step, gates, is_stepped

#: The tensors to write each key's value to.
_Outs: TypeAlias = "dict[Key, list[Tensor]]"


class KVStore:
    """Tensors by key, shared by several processes; created by :func:`distkit.kvstore.create`.

    Args:
        requests: sends the store's requests.
        options: the store's options.
        num_workers: number of workers that share the store.
        servers: the ids of the nodes that hold the values.
        scheduler: the id of the scheduler.
        barriers: number of barriers that the run has passed.
        initializer: the worker whose values initialize the keys.

    Example, on two workers::

        kv = kvstore.create("dist_sync")
        kv.init("w", torch.zeros(2))
        kv.push("w", [torch.ones(2), torch.ones(2)])  # a gradient from each of two devices
        kv.pull("w")  # tensor([4., 4.])
    """

    def __init__(
        self,
        requests: Requests,
        options: StoreOptions,
        *,
        num_workers: int,
        servers: Sequence[int],
        scheduler: int,
        barriers: int = 0,
        initializer: int = 0,
    ) -> None:
        #: The store's name, the number of workers, and this worker's rank.
        self.type, self.num_workers, self.rank = options.mode, num_workers, requests.node
        self._where = "device" if self.type.endswith("_device") else "host"
        self.options, self._requests = options, requests
        self._servers, self._scheduler = servers, scheduler
        self._layouts: dict[Key, Layout] = {}
        self._barriers, self._initializer = barriers, initializer
        self._compression: Compression | None = None
        self._function: int | None = None  # the argument of ``once``
        self._push_counts: Counter[Key] = Counter()  # pushes of that function so far
        self._versions: dict[tuple[Key, int], int] = {}  # last version pulled, by key and server
        #: Number of this worker's gradients that were too late for their round, by key.
        self.dropped: dict[Key, int] = {}
        #: Called at the end of a successful run, before the store is closed.
        self.at_end: list[Callable[[], None]] = []
        #: The traffic of this worker's pushes so far.
        self.traffic = Traffic()

    def __repr__(self) -> str:
        return f"<KVStore {self.type}: worker {self.rank} of {self.num_workers}>"

    # -- MXNet's calls ----------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Initialize keys with the values of worker 0; the other workers' values are ignored.

        Every worker must call it; it returns when the values are set. If worker 0 was not present
        at the start of the run, the lowest-numbered worker sets the values.

        Args:
            key: a key (an integer or a string) or a list of keys.
            value: a tensor for each key.

        Raises:
            KVStoreError: the key was already initialized in this run, has a different shape or
                dtype on another worker, or is repeated.
        """
        values = group_by_key("init", key, value)
        layouts = {k: Layout(tuple(t.shape), dtype_name(t)) for k, (t, *_) in values.items()}
        is_initializer = self.rank == self._initializer
        self._step([*layouts], layouts.values() if is_initializer else ())
        self._requests.call(
            [c for k in values for c in self._inits(k, layouts[k], values[k], is_initializer)]
        )
        self._layouts |= layouts

    def _inits(
        self, key: Key, layout: Layout, tensors: list[Tensor], is_initializer: bool
    ) -> Iterable[Call]:
        if len(tensors) > 1:
            raise KVStoreError(f"init of {key!r} got {len(tensors)} tensors. Pass one tensor.")
        value = sum_devices(tensors, self._where, Traffic()) if is_initializer else None
        for node, part in self._parts(key, layout):
            shard = None if value is None else slice_part(value, part)
            fields = key, layout.shape, layout.dtype, shard, self._initializer
            yield Call(node, Init, fields)

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send gradients to the servers, without waiting for them to arrive.

        Args:
            key: a key or a list of keys.
            value: for each key, a tensor with the shape and dtype of the initial one, or a list of
                such tensors, whose sum is sent. A repeated key is sent once, with the sum.
            priority: accepted for compatibility with MXNet; keys are sent in the order passed.

        Raises:
            KVStoreError: the key is not initialized, or ``value`` has a different shape or dtype. A
                server's errors are raised by the next call on that key.
        """
        self._push(group_by_key("push", key, value))

    def _push(self, gradients: _Outs) -> None:
        self._post(gradients)
        self._requests.dispatch()
        if gates and is_stepped():
            self._requests.wait_for_pushes()  # they arrive before later pushes from other workers

    def _post(self, gradients: _Outs, *, copy: bool = True) -> None:
        """Sum each key's gradients and queue the sums."""
        self._requests.check(gradients)
        self._check("push of", gradients, dtype=True)
        self._step([*gradients], map(self._layout, gradients))
        for k, tensors in gradients.items():
            total, once = sum_devices(tensors, self._where, self.traffic, copy=copy), self._once(k)
            shape = self._layout(k).shape
            for node, part in self._parts(k):
                value, threshold = slice_part(total, part), 0.0
                if self._compression is not None and value.is_floating_point():
                    threshold = self._compression.threshold
                    value = self._compression.pack(k, part.server, value)
                self.traffic.sent += value.nbytes
                version = self._versions.get((k, part.server), 0)
                fields = k, shape, version, value, threshold, once
                self._requests.post(Call(node, Push, fields))

    def _once(self, key: Key) -> tuple[int, ...]:
        """Return the identity of a key's next push, or () outside the block of :meth:`once`."""
        if self._function is None:
            return ()
        self._push_counts[key] += 1
        return self._function, self._push_counts[key]

    def pull(
        self, key: Keys, out: Values | None = None, priority: int = 0
    ) -> Tensor | list[Tensor] | None:
        """Get the values; under ``dist_sync`` they include this worker's pushes.

        Args:
            key: a key or a list of keys.
            out: for each key, a tensor of any dtype to write to, or a list of tensors.
            priority: as in :meth:`push`.

        Returns:
            The tensor or the list of tensors, if ``out`` is None.

        Raises:
            KVStoreError: a key is not initialized, ``out`` does not fit, or an earlier push was
                rejected.
        """
        outs = self._outs(key, out)
        self._step(keys := key_list(key), map(self._layout, keys))
        return self._pull(key, outs)

    def _outs(self, key: Keys, out: Values | None) -> _Outs | None:
        """Return the checked outputs, or None if the values are returned."""
        outs = None if out is None else group_by_key("pull", key, out)
        self._check("pull of", outs or {}, dtype=False)
        return outs

    def _pull(self, key: Keys, outs: _Outs | None) -> Tensor | list[Tensor] | None:
        keys = key_list(key)
        parts = {k: self._parts(k) for k in keys}
        calls = [Call(node, Pull, (k,)) for k in parts for node, _ in parts[k]]
        responses = iter(self._requests.call(calls))
        self._requests.check(parts)
        values = {k: [self._value(k, p, next(responses)) for _, p in parts[k]] for k in parts}
        if outs is not None:
            for k, tensors in outs.items():
                for tensor in tensors:
                    write(tensor, [part for _, part in parts[k]], values[k])
            return None
        arrays = [concatenate(values[k], self._layout(k).shape) for k in keys]
        return arrays if isinstance(key, (list, tuple)) else arrays[0]

    def _value(self, key: Key, part: Part, reply: Reply) -> Any:
        """Return the pulled value and record its version, for the next gradient."""
        self._versions[key, part.server] = reply.version
        if reply.dropped:
            self.dropped[key] = reply.dropped
        return reply.value

    def pushpull(
        self,
        key: Keys,
        value: Values,
        out: Values | None = None,
        priority: int = 0,
    ) -> Tensor | list[Tensor] | None:
        """Push, then pull the result; small tensors are sent together with the pull request.

        Args:
            key: a key or a list of keys.
            value: as in :meth:`push`.
            out: as in :meth:`pull`; by default ``value``, which then contains the sum over all
                workers if there is no optimizer.
            priority: as in :meth:`push`.

        Returns:
            The pulled values, if ``out`` is None.

        Raises:
            KVStoreError: see :meth:`push` and :meth:`pull`.
        """
        gradients, outs = group_by_key("push", key, value), self._outs(key, out)
        if gates or sum(tensors[0].nbytes for tensors in gradients.values()) > MAX_QUEUED:
            self._push(gradients)
            self._step(keys := key_list(key), map(self._layout, keys))
        else:  # the tensors cannot change before this returns
            self._post(gradients, copy=False)
        values = self._pull(key, outs)
        if outs is None:
            results: Any = values if isinstance(values, list) else [values]
            for k, result in zip(key_list(key), results, strict=True):
                for tensor in gradients[k]:
                    tensor.detach().copy_(result)
        return values

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Send 2 bits per element of a gradient; the rounding error is added to the next push.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``: the servers receive
                −threshold, 0 or +threshold.

        Raises:
            KVStoreError: the type or a parameter is unknown, or the threshold is not positive.
        """
        self._compression = Compression(compression_params)

    @contextmanager
    def once(self, function: int) -> Iterator[None]:
        """Apply each push in this block once, even if the function runs again elsewhere.

        At the end of the block, all pushes have arrived. Servers ignore repetitions of a function's
        n-th push of a key.

        Args:
            function: the function's number in this run.

        Raises:
            KVStoreError: a push was rejected.
        """
        self._function = function
        self._push_counts.clear()
        try:
            yield
            self._requests.flush()
        finally:
            self._function = None

    # -- updates ----------------------------------------------------------------

    def set_optimizer(
        self,
        optimizer: object,
        *,
        keys: Sequence[Key] = (),
        replace: bool = False,
        **options: Any,
    ) -> None:
        """Set the optimizer that the servers apply to each gradient or sum of gradients.

        Every worker must call it with the same optimizer, before the first push.

        Args:
            optimizer: ``kvstore.SGD(learning_rate=0.1)``, a class or an instance of
                ``torch.optim``, or a name such as "sgd" or "adam".
            keys: the keys that the optimizer updates; by default, all keys that have no optimizer
                of their own.
            replace: whether to replace the servers' optimizer; then only one worker calls this,
                between two barriers.
            options: options of the optimizer, such as ``lr=0.1``, and the common options
                ``rescale_grad`` and ``multi_precision``; see :class:`.OptimizerSpec`.

        Raises:
            KVStoreError: the optimizer is not supported, or differs from the current one.
        """
        spec = spec_of(optimizer, options)
        fields = spec.name, dict(spec.options), replace, tuple(keys)
        self._step([])
        self._requests.call([Call(s, SetOptimizer, fields) for s in self._servers])

    def _assign(self, key: Key, value: Tensor) -> None:
        """Replace a value and reset its optimizer state."""
        flat = host_copy(value)
        parts = self._parts(key)
        self._requests.call([Call(n, Assign, (key, slice_part(flat, p))) for n, p in parts])

    def barrier(self) -> None:
        """Wait until every worker has called it and this worker's pushes have arrived.

        Raises:
            KVStoreError: an earlier push was rejected.
        """
        self._requests.flush()
        self._step([])
        if self.options.on_crash == "replace":  # servers stop waiting for its gradients
            self._requests.call([Call(s, AtBarrier, ()) for s in self._servers])
        call = Call(self._scheduler, Barrier, (self._barriers,))
        (reply,) = self._requests.call([call])
        self._barriers = reply.version

    _barrier = barrier  # MXNet's name

    def note(self, name: str, text: str | None = None) -> str:
        """Store text under a name and return it, or return the text that is stored under the name.

        Args:
            name: the name, shared by the workers of this run.
            text: the text to store, or None to read the stored text, which is "" by default.
        """
        (response,) = self._requests.call([Call(self._scheduler, Note, (name, text))])
        return str(response.text)

    # -- placement and end ------------------------------------------------------

    def key_map(self) -> dict[Key, list[Part]]:
        """Return the parts of each key, with the servers (numbered from 0) that hold them."""
        return {k: [part for _, part in self._parts(k)] for k in self._layouts}

    def close(self, *, flush: bool = True) -> None:
        """Close the connections at the end of a run, by default after all pushes have arrived.

        Raises:
            KVStoreError: a push was rejected.
        """
        try:
            if flush:
                for callback in self.at_end:
                    callback()
                self._requests.flush()
                if self.options.on_crash == "replace":
                    nodes = [*self._servers, self._scheduler]
                    self._requests.call([Call(n, Finished, ()) for n in nodes])
        finally:
            self._requests.close()

    def _layout(self, key: Key, action: str = "pull of") -> Layout:
        if key not in self._layouts:
            raise KVStoreError(
                f"{action} {key!r} failed: this worker has not initialized the key in this run. "
                f"Call kv.init({key!r}, value) on every worker first."
            )
        return self._layouts[key]

    def _parts(self, key: Key, layout: Layout | None = None) -> list[tuple[int, Part]]:
        """Return a key's parts, each with its server's id; a new key needs its layout."""
        size = (layout or self._layout(key)).size
        parts = parts_of(key, size, len(self._servers), self.options.bound)
        return [(self._servers[part.server], part) for part in parts]

    def _check(self, action: str, tensors_by_key: _Outs, *, dtype: bool) -> None:
        """Check that tensors have the shape of their key, and its dtype if ``dtype``."""
        for key, tensors in tensors_by_key.items():
            layout = self._layout(key, action)
            for tensor in tensors:
                dtype_to_check = dtype_name(tensor) if dtype else layout.dtype
                layout.check(action, key, tensor.shape, dtype_to_check)

    def _step(self, keys: list[Key], layouts: Iterable[Layout] = ()) -> None:
        """Register a call with these keys and tensors as one step."""
        if gates:
            self._requests.step = Step.for_call(keys, sum(layout.nbytes for layout in layouts))


# -- the store of this process --------------------------------------------------------

_node: Node | None = None
_store: KVStore | None = None
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
        name: ``"dist_sync"``: servers wait for every worker's gradient and apply the sum.
            ``"dist_async"``: servers apply each gradient as it arrives; no worker waits.
            ``"dist_sync_device"``, ``"dist_async_device"``: the same, but the gradients of a
            worker's devices are added on a device.
        bigarray_bound: minimum size of an array that is split over all servers [elements].
        staleness: for dist_async, the number of gradients by which a worker may be ahead of the
            slowest before its pulls wait (bounded staleness), or None for no limit.
        backup: for dist_sync, the number of workers that a round does not wait for. Gradients
            that arrive too late are dropped (``kv.dropped`` counts them).
        replication: number of servers that hold each value, 1 or 2. With 2, no acknowledged push
            is lost if one server crashes.
        on_crash: for dist_sync, the effect of a worker's crash. ``"halt"``: the run ends with
            an error that names the worker; with ``backup``, only if too many workers have exited.
            ``"continue"``: the others continue without it, with sums of fewer gradients.
            ``"replace"``: the others wait for a replacement, which a ``dk.Cluster`` starts
            immediately. It runs the function from the start and pulls the current values. With
            dist_async a replacement is also started, but no worker waits.

    Raises:
        KVStoreError: The name is unknown, the cluster has no servers, or other workers passed
            different options.
    """
    global _store
    options = StoreOptions(name, bigarray_bound, staleness, backup, replication, on_crash)
    if _node is None or not _node.servers:
        raise KVStoreError(
            f'a "{name}" store needs a cluster with servers, and this process is not a worker of '
            "one. Start a cluster with dk.Cluster(workers=4, servers=2), "
            "and call kvstore.create inside the function that it runs."
        )
    options.check_cluster(_node.workers, _node.servers)
    if _store is None:
        _report(options.crash_effect)  # before registering: a worker may exit at any time
        _store = _join(_node, options)
    if _store.options != options:
        raise KVStoreError(
            f"worker {_node.index} already has the store {_store.options} in this run, but "
            f"requests {options}. Create the same store throughout the run."
        )
    return _store


def _join(node: Node, options: StoreOptions) -> KVStore:
    """Register with the scheduler, wait for all nodes, and connect to the servers."""
    link, servers = Link(node.keys, node.route), range(node.workers, node.scheduler)
    requests = Requests(
        link,
        node.id,
        first=INCARNATION_STRIDE * node.incarnation,
        name=node.name,
        servers=servers,
        replication=options.replication,
    )
    link.connect(node.scheduler, node.endpoint(node.scheduler))
    (book,) = requests.call([Call(node.scheduler, Register, ("", options))])
    for server in servers:
        if server in book.endpoints:
            link.connect(server, book.endpoints[server])
        else:
            requests.handle_departure(server, "before this worker started")
    return KVStore(
        requests,
        options,
        num_workers=node.workers,
        servers=servers,
        scheduler=node.scheduler,
        barriers=book.barriers,
        initializer=min(n for n in book.endpoints if n < node.workers),
    )


def use(node: Node, report: Callable[[str], None] = lambda crash_effect: None) -> None:
    """Make this process a worker in a cluster, until :func:`release`.

    Args:
        node: the process's identity in the cluster.
        report: called when a store is created, with the effect of a worker's exit on the run, as
            in ``on_crash``.
    """
    global _node, _report
    _node, _report = node, report


def current_node() -> Node | None:
    """Return this process's node in the current run, or None if it is not a worker."""
    return _node


def release(*, flush: bool = True) -> None:
    """Close this process's store at the end of a run.

    Args:
        flush: whether to wait until the pushes have arrived; False for a run that was interrupted
            or failed.

    Raises:
        KVStoreError: A push was rejected, and no earlier call has raised its error.
    """
    global _node, _store
    store, _node, _store = _store, None, None
    if store is not None:
        store.close(flush=flush)
