"""The worker's side: the KVStore that training code calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.messages import Barrier, Describe, Init, Key, Pull, Push, Reply, SetOptimizer
from distkit.kvstore.optimizer import to_spec
from distkit.kvstore.placement import Layout, Part, home, place
from distkit.kvstore.requests import Call, Requests
from distkit.kvstore.tensors import Keys, Values, each, fresh, pairs, whole, write


class KVStore:
    """Weights that several processes share: key → tensor. Made by :func:`distkit.kvstore.create`.

    Args:
        requests: carries what it asks.
        type: "local", "dist_sync" or "dist_async".
        num_workers: how many workers share the store.
        servers: the ids of the nodes that hold it.
        scheduler: the id of the node where workers meet; None if there is one worker.
        bound: number of elements from which an array is split over all servers.

    >>> import torch
    >>> from distkit import kvstore
    >>> kv = kvstore.create("local")
    >>> kv.init("w", torch.zeros(2))
    >>> kv.push("w", [torch.ones(2), torch.ones(2)])     # a gradient from each of two devices
    >>> kv.pull("w")
    tensor([2., 2.])
    """

    def __init__(
        self, requests: Requests, *, type: str, num_workers: int, servers: Sequence[int],
        scheduler: int | None, bound: int,
    ) -> None:  # fmt: skip
        self._type, self._num_workers, self.bigarray_bound = type, num_workers, bound
        self._requests, self._servers, self._scheduler = requests, servers, scheduler
        self._layouts: dict[Key, Layout] = {}
        self._versions: dict[tuple[Key, int], int] = {}  # last pulled, by key and server
        self._barriers = 0

    def __repr__(self) -> str:
        return f"<KVStore {self.type}: worker {self.rank} of {self.num_workers}>"

    @property
    def type(self) -> str:
        """The name it was created by."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._requests.node

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return self._num_workers

    # -- MXNet's calls ----------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Give keys their first value: that of worker 0, whatever the others give.

        Every worker calls it, and it returns when the value is there.

        Args:
            key: a key or a list of keys: numbers or strings.
            value: a tensor for each.

        Raises:
            KVStoreError: initialised already in this run, or with another shape or dtype.
        """
        found = pairs("init", key, value)
        self._requests.ask([call for k, tensors in found for call in self._inits(k, tensors)])
        self._layouts |= {k: Layout.of(tensors[0]) for k, tensors in found}

    def push(self, key: Keys, value: Values) -> None:
        """Send gradients to the servers, without waiting for them to arrive.

        Args:
            key: a key or a list of keys.
            value: for each key a tensor like the first, or a list of such: their sum is sent.

        Raises:
            KVStoreError: not initialised, or with another shape or dtype. What only a server
                can tell is raised by the next call on that key.
        """
        found = pairs("push", key, value)
        self._requests.check(k for k, _ in found)
        layouts = self._fitting("push of", found)
        for k, tensors in found:
            for call in self._pushes(k, layouts[k], fresh(tensors)):
                self._requests.post(call)

    def pull(self, key: Keys, out: Values | None = None) -> Tensor | list[Tensor] | None:
        """Get the values; under ``dist_sync`` those with this worker's pushes merged in.

        Args:
            key: a key or a list of keys.
            out: for each key a tensor to write to, or a list of such.

        Returns:
            The tensor, or the list of tensors, if there is no ``out``.

        Raises:
            KVStoreError: not initialised, ``out`` does not fit, or an earlier push was refused.
        """
        keys = each(key)
        outs = [] if out is None else pairs("pull", key, out)
        self._fitting("pull of", outs)
        values = self._values(keys)
        for k, tensors in outs:
            for tensor in tensors:
                write(tensor, self._parts(k), values[k])
        if out is not None:
            return None
        found = [whole(values[k], self._layout(k).shape) for k in keys]
        return found if isinstance(key, (list, tuple)) else found[0]

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None
    ) -> Tensor | list[Tensor] | None:
        """A push, and a pull of what came of it."""
        self.push(key, value)
        return self.pull(key, out)

    def set_optimizer(self, optimizer: object) -> None:
        """Let the servers update the values with each gradient (or sum of gradients).

        Every worker calls it with the same optimizer, before the first push.

        Args:
            optimizer: such as ``kvstore.SGD(learning_rate=0.1)``.

        Raises:
            KVStoreError: none that the servers know, or another than they have.
        """
        spec = to_spec(optimizer)
        self._requests.ask([Call(server, SetOptimizer, spec) for server in self._servers])

    def barrier(self) -> None:
        """Wait until every worker is here; this worker's pushes have arrived by then.

        Raises:
            KVStoreError: an earlier push was refused.
        """
        self._requests.flush()
        if self._scheduler is not None:
            self._requests.ask([Call(self._scheduler, Barrier, (self._barriers,))])
        self._barriers += 1

    # -- where things are -------------------------------------------------------

    def key_map(self, keys: Keys | None = None) -> dict[Key, list[Part]]:
        """Which server (numbered from 0) holds which elements of which key.

        Args:
            keys: a key or a list of keys; by default all that this worker has used.

        Raises:
            KVStoreError: a key is not initialised.
        """
        wanted = list(self._layouts) if keys is None else each(keys)
        return {k: self._parts(k) for k in wanted}

    def close(self, *, flush: bool = True) -> None:
        """Hang up, by default when all pushes have arrived. Called at the end of a run.

        Raises:
            KVStoreError: a push was refused.
        """
        try:
            if flush:
                self._requests.flush()
        finally:
            self._requests.close()

    # -- requests of one key ----------------------------------------------------

    def _inits(self, key: Key, tensors: list[Tensor]) -> Iterable[Call]:
        if len(tensors) > 1:
            raise KVStoreError(f"init of {key!r} with {len(tensors)} tensors. Give one.")
        layout = Layout.of(tensors[0])
        flat = fresh(tensors) if self.rank == 0 else None
        for part in self._place(key, layout):
            value = None if flat is None else flat[part.start : part.stop]
            yield Call(self._node(part), Init, (key, layout.shape, layout.dtype, value))

    def _pushes(self, key: Key, layout: Layout, flat: Tensor) -> Iterable[Call]:
        for part in self._place(key, layout):
            version = self._versions.get((key, part.server), 0)
            value = flat[part.start : part.stop]
            yield Call(self._node(part), Push, (key, layout.shape, version, value))

    def _values(self, keys: list[Key]) -> dict[Key, list[Tensor]]:
        """The parts of each key's value, all asked for at once."""
        wanted = [(k, part) for k in dict.fromkeys(keys) for part in self._parts(k)]
        answers = self._requests.ask([Call(self._node(p), Pull, (k,)) for k, p in wanted])
        self._requests.check(keys)
        values: dict[Key, list[Tensor]] = {k: [] for k in keys}
        for (k, part), answer in zip(wanted, answers, strict=True):
            assert isinstance(answer, Reply) and answer.value is not None
            self._versions[k, part.server] = answer.version
            values[k].append(answer.value)
        return values

    def _fitting(self, what: str, found: list[tuple[Key, list[Tensor]]]) -> dict[Key, Layout]:
        """The layouts of these keys, which all their tensors have."""
        layouts = {k: self._layout(k) for k, _ in found}
        for k, tensors in found:
            for tensor in tensors:
                layouts[k].check(what, k, Layout.of(tensor))
        return layouts

    def _layout(self, key: Key) -> Layout:
        """What a key was initialised as; asks its server if another worker did it."""
        if key not in self._layouts:
            call = Call(self._servers[home(key, len(self._servers))], Describe, (key,))
            (answer,) = self._requests.ask([call])
            assert isinstance(answer, Reply)
            self._layouts[key] = Layout(answer.shape, answer.dtype)
        return self._layouts[key]

    def _parts(self, key: Key) -> list[Part]:
        return self._place(key, self._layout(key))

    def _place(self, key: Key, layout: Layout) -> list[Part]:
        return place(key, layout.size, len(self._servers), self.bigarray_bound)

    def _node(self, part: Part) -> int:
        return self._servers[part.server]
