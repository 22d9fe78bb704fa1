"""The worker's side: the KVStore that training code calls."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeAlias

from torch import Tensor

from distkit.errors import KVStoreError
from distkit.gone import GONE
from distkit.kvstore.client.requests import LETTER, Call, Requests
from distkit.kvstore.client.tensors import (
    Keys,
    Traffic,
    Values,
    add_up,
    by_key,
    by_priority,
    cut,
    each,
    fresh,
    whole,
    write,
)
from distkit.kvstore.protocol import messages
from distkit.kvstore.protocol.compression import Compression
from distkit.kvstore.protocol.messages import Answer, Key, Reply
from distkit.kvstore.protocol.optimizer import OptimizerSpec, spec_of
from distkit.kvstore.protocol.placement import Layout, Part, dtype_name, place
from distkit.kvstore.protocol.terms import canonical
from distkit.kvstore.transport.recording import Step, gates, stepped

#: For each key the tensors to write its value to.
_Outs: TypeAlias = "dict[Key, list[Tensor]]"


class KeyDirectory:
    """The servers of a store, as its worker sees them.

    Args:
        servers: the ids of the nodes that hold the values.
        bound: number of elements from which an array is split over all servers.
    """

    def __init__(self, servers: Sequence[int], bound: int) -> None:
        self.servers, self.bound = servers, bound
        self.layouts: dict[Key, Layout] = {}

    def layout(self, key: Key, what: str = "pull of") -> Layout:
        """The layout of a key.

        Raises:
            KVStoreError: this worker has not initialised it.
        """
        if key not in self.layouts:
            near = ", ".join(get_close_matches(repr(key), map(repr, self.layouts), 5, cutoff=0))
            raise KVStoreError(
                f"{what} {key!r}, a key that this worker has not initialised in this run. "
                f"Call kv.init({key!r}, value) on every worker first."
                + (f" The most similar keys: {near}." if near else "")
            )
        return self.layouts[key]

    def parts(self, key: Key, layout: Layout | None = None) -> list[tuple[int, Part]]:
        """The parts of a key, each with the id of its server; of a new key if given its layout."""
        size = (layout or self.layout(key)).size
        found = place(key, size, len(self.servers), self.bound)
        return [(self.servers[part.server], part) for part in found]

    def held_by(self, server: int) -> list[Key]:
        """The keys of which this server has a part."""
        return [k for k in self.layouts if any(server == node for node, _ in self.parts(k))]

    def check(self, what: str, found: _Outs, *, dtype: bool) -> None:
        """Refuse tensors that do not have their key's shape, and ``dtype`` where that counts.

        Raises:
            KVStoreError: one does not, or its key is not initialised.
        """
        for key, tensors in found.items():
            layout = self.layout(key, what)
            for tensor in tensors:
                has = dtype_name(tensor) if dtype else layout.dtype
                layout.check(what, key, tensor.shape, has)


class KVStore:
    """Weights that several processes share: key → tensor. Made by :func:`distkit.kvstore.create`.

    Args:
        requests: carries what it asks.
        type: the name it was created by, such as "dist_sync".
        num_workers: how many workers share the store.
        servers: the ids of the nodes that hold it.
        scheduler: the id of the node where workers meet; None if there is one worker.
        bound: number of elements from which an array is split over all servers.
        replaces: another process takes the place of a dead worker, so that servers must know who
            waits at a barrier.
        barriers: how many barriers the run has passed.
        giver: the worker whose values are the first ones of keys.

    >>> import torch
    >>> from distkit import kvstore
    >>> kv = kvstore.create("local")
    >>> kv.init("w", torch.zeros(2))
    >>> kv.push("w", [torch.ones(2), torch.ones(2)])     # a gradient from each of two devices
    >>> kv.pull("w")
    tensor([2., 2.])
    """

    def __init__(
        self,
        requests: Requests,
        *,
        type: str,
        num_workers: int,
        servers: Sequence[int],
        scheduler: int | None,
        bound: int,
        replaces: bool = False,
        barriers: int = 0,
        giver: int = 0,
    ) -> None:
        #: The name it was created by; how many workers share it; this one's number, from 0.
        self.type, self.num_workers, self.rank = type, num_workers, requests.node
        self._mode = canonical(type)
        place = "device" if self._mode.endswith("_device") else "host"
        self._where = "stay" if self._mode == "device" else place  # devices' gradients are added
        self._requests, self._scheduler = requests, scheduler
        self._keys = KeyDirectory(servers, bound)
        requests.held_by = self._keys.held_by
        self._replaces, self._barriers, self._giver = replaces, barriers, giver
        self._compression: Compression | None = None
        self._optimizer: OptimizerSpec | None = None
        self._function: tuple[int, int] | None = None  # whose pushes count once, and the floor
        self._made: Counter[Key] = Counter()  # its pushes so far
        self._weights: set[Key] = set()  # keys with other first values than zeros …
        self._read: set[Key] = set()  # … and those of them that were pulled
        self._versions: dict[tuple[Key, int], int] = {}  # last pulled, by key and server
        #: This worker's gradients of each key that came too late for their round.
        self.dropped: dict[Key, int] = {}
        #: Called when a run that did not fail is over, before the store is closed.
        self.at_end: list[Callable[[], None]] = []
        #: What its pushes came to so far.
        self.traffic = Traffic()

    def __getattr__(self, name: str) -> Any:
        """Say what to do instead of what was removed."""
        raise AttributeError(GONE.get(f"KVStore.{name}", f"KVStore has no attribute {name!r}"))

    def __repr__(self) -> str:
        return f"<KVStore {self.type}: worker {self.rank} of {self.num_workers}>"

    # -- MXNet's calls ----------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Give keys their first value: that of worker 0, whatever the others give.

        Every worker calls it, and it returns when the value is there. If worker 0 was not there
        when the run began, the first of the others gives the value.

        Args:
            key: a key or a list of keys: numbers or strings.
            value: a tensor for each.

        Raises:
            KVStoreError: initialised already in this run, or with another shape or dtype; or a
                key is given twice.
        """
        found = by_key("init", key, value)
        layouts = {k: Layout.of(tensors[0]) for k, tensors in found.items()}
        gives = self.rank == self._giver
        self._step([*layouts], layouts.values() if gives else ())
        self._requests.ask([c for k in found for c in self._inits(k, layouts[k], found[k], gives)])
        self._keys.layouts |= layouts
        self._weights |= {k for k, (t, *_) in found.items() if bool(t.any())}

    def _inits(
        self, key: Key, layout: Layout, tensors: list[Tensor], gives: bool
    ) -> Iterable[Call]:
        if len(tensors) > 1:
            raise KVStoreError(f"init of {key!r} with {len(tensors)} tensors. Give one.")
        value = add_up(tensors, self._where, Traffic()) if gives else None
        for node, part in self._keys.parts(key, layout):
            mine = None if value is None else cut(value, part)
            fields = key, layout.shape, layout.dtype, mine, self._giver
            yield Call(node, messages.Init, fields)

    def push(self, key: Keys, value: Values, priority: int | Sequence[int] = 0) -> None:
        """Send gradients to the servers, without waiting for them to arrive.

        Args:
            key: a key or a list of keys.
            value: for each key a tensor like the first, or a list of such: their sum is sent. A
                key that is given twice is sent once, with the sum.
            priority: of the keys, or of each: keys of higher priority are sent first.

        Raises:
            KVStoreError: not initialised, or with another shape or dtype. What only a server can
                tell is raised by the next call on that key.
        """
        found = by_key("push", key, value)
        sums = self._optimizer is None and self._mode.startswith("dist_sync")
        if sums and (lost := self._read.intersection(found)):
            self._weights, self._read = set(), set()  # said once
            warnings.warn(
                f"push of {next(iter(lost))!r} without an optimizer: the sum of this round "
                "replaces the value that was pulled before. To update it instead, call "
                "kv.set_optimizer(kvstore.SGD(learning_rate=...)) on every worker first.",
                stacklevel=2,
            )
        self._push(found, priority)

    def _push(self, found: _Outs, priority: int | Sequence[int]) -> None:
        try:
            self._post(found, priority)
        finally:
            self._requests.dispatch()
        if gates and stepped():
            self._requests.arrive()  # what others push afterwards comes later

    def _post(self, found: _Outs, priority: int | Sequence[int], *, copy: bool = True) -> None:
        """Add up each key's gradients, and post the sums in the order of their priority."""
        self._requests.check(found)
        self._keys.check("push of", found, dtype=True)
        order = by_priority([*found], priority)
        self._step(order, map(self._keys.layout, order))
        for k in order:
            total, once = add_up(found[k], self._where, self.traffic, copy=copy), self._once(k)
            shape = self._keys.layout(k).shape
            for node, part in self._keys.parts(k):
                value, threshold = cut(total, part), 0.0
                if self._compression is not None and value.is_floating_point():
                    threshold = self._compression.threshold
                    value = self._compression.pack(k, part.server, value)
                self.traffic.sent += value.nbytes
                version = self._versions.get((k, part.server), 0)
                fields = k, shape, version, value, threshold, once
                self._requests.post(Call(node, messages.Push, fields))

    def _once(self, key: Key) -> tuple[int, ...]:
        """Names the next push of a key by a function that may run again."""
        if self._function is None:
            return ()
        self._made[key] += 1
        return self._function[0], self._made[key] - 1, self._function[1]

    def pull(
        self, key: Keys, out: Values | None = None, priority: int | Sequence[int] = 0
    ) -> Tensor | list[Tensor] | None:
        """Get the values; under ``dist_sync`` those with this worker's pushes merged in.

        Args:
            key: a key or a list of keys.
            out: for each key a tensor to write to, or a list of such; of any dtype.
            priority: of the keys, or of each: keys of higher priority are asked for first.

        Returns:
            The tensor, or the list of tensors, if there is no ``out``.

        Raises:
            KVStoreError: not initialised, ``out`` does not fit, or an earlier push was refused.
        """
        outs = self._outs(key, out)
        self._step(keys := each(key), map(self._keys.layout, keys))
        return self._pull(key, outs, priority)

    def _outs(self, key: Keys, out: Values | None) -> _Outs | None:
        """The outputs for the values, checked; None if the values are to be returned."""
        outs = None if out is None else by_key("pull", key, out)
        self._keys.check("pull of", outs or {}, dtype=False)
        return outs

    def _pull(
        self, key: Keys, outs: _Outs | None, priority: int | Sequence[int]
    ) -> Tensor | list[Tensor] | None:
        keys = each(key)
        self._read |= self._weights.intersection(keys)
        asked = {k: self._keys.parts(k) for k in by_priority(keys, priority)}
        calls = [Call(node, messages.Pull, (k,)) for k in asked for node, _ in asked[k]]
        answers = iter(self._requests.ask(calls))
        self._requests.check(asked)
        values = {k: [self._value(k, p, next(answers)) for _, p in asked[k]] for k in asked}
        if outs is not None:
            for k, tensors in outs.items():
                for tensor in tensors:
                    write(tensor, [part for _, part in asked[k]], values[k])
            return None
        found = [whole(values[k], self._keys.layout(k).shape) for k in keys]
        return found if isinstance(key, (list, tuple)) else found[0]

    def _value(self, key: Key, part: Part, reply: Answer) -> Tensor:
        """The result of a pull: from now on gradients are computed from this version."""
        assert isinstance(reply, Reply) and reply.value is not None
        self._versions[key, part.server] = reply.version
        if reply.dropped:
            self.dropped[key] = reply.dropped
        return reply.value

    def pushpull(
        self,
        key: Keys,
        value: Values,
        out: Values | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Tensor | list[Tensor] | None:
        """A push, and a pull of what came of it: of small tensors both are sent together.

        Args:
            key: a key or a list of keys.
            value: as in :meth:`push`.
            out: as in :meth:`pull`; by default ``value``, which then has the sum of all workers'
                if there is no optimizer.
            priority: of the keys, or of each.

        Returns:
            What was pulled, if there is no ``out``.

        Raises:
            KVStoreError: what :meth:`push` or :meth:`pull` would raise.
        """
        found, outs = by_key("push", key, value), self._outs(key, out)
        if gates or sum(tensors[0].nbytes for tensors in found.values()) > LETTER:
            self._push(found, priority)
            self._step(keys := each(key), map(self._keys.layout, keys))
        else:  # nobody changes the tensors before this returns
            self._post(found, priority, copy=self._scheduler is None)
        pulled = self._pull(key, outs, priority)
        if outs is None:
            news: Any = pulled if isinstance(pulled, list) else [pulled]
            for k, new in zip(each(key), news, strict=True):
                for tensor in found[k]:
                    tensor.detach().copy_(new)
        return pulled

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Send 2 bits for each element of a gradient; what is lost is added to the next push.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``: the servers get
                −threshold, 0 or +threshold.

        Raises:
            KVStoreError: another type or parameter, or a store that sends nothing.
        """
        if not self._mode.startswith("dist"):
            raise KVStoreError(
                f'set_gradient_compression on a "{self.type}" store has no effect: it sends '
                'nothing. Use a "dist_…" store.'
            )
        self._compression = Compression(compression_params)

    @contextmanager
    def once(self, function: int, floor: int = 0) -> Iterator[None]:
        """Pushes meanwhile count once, even if this function runs again on another worker.

        At the end all of them have arrived. The servers keep the first push of a key that a
        function makes, the first second one, and so on.

        Args:
            function: its number in this run.
            floor: all functions with a lower number are over: none of them will run again.

        Raises:
            KVStoreError: a push was refused.
        """
        self._function = function, floor
        self._made.clear()
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
        anew: bool = False,
        **options: Any,
    ) -> None:
        """Let the servers update the values with each gradient (or sum of gradients).

        Every worker calls it with the same optimizer, before the first push.

        Args:
            optimizer: ``kvstore.SGD(learning_rate=0.1)``, a class or an instance of
                ``torch.optim``, or a name such as "sgd" or "adam".
            keys: which keys it updates; by default all without an optimizer of their own.
            anew: change the one that the servers have; between two barriers, on one worker.
            options: of a name or class, such as ``lr=0.1``; and those that every optimizer may
                have: ``rescale_grad`` and ``multi_precision``, see :class:`.OptimizerSpec`.

        Raises:
            KVStoreError: none that the servers know, or another than they have.
        """
        self._set_optimizer(spec_of(optimizer, options), keys, messages.ALWAYS * anew)

    def _set_optimizer(self, spec: OptimizerSpec, keys: Sequence[Key], change: int) -> None:
        """Send a specification; ``change`` is as in :class:`.SetOptimizer`."""
        fields = spec.name, dict(spec.options), change, tuple(keys)
        self._step([])
        self._requests.ask([Call(s, messages.SetOptimizer, fields) for s in self._keys.servers])
        self._optimizer = spec

    def _assign(self, key: Key, value: Tensor) -> None:
        """Replace a value, and forget what the optimizer kept of it."""
        flat = fresh(value)
        parts = self._keys.parts(key)
        self._requests.ask([Call(n, messages.Assign, (key, cut(flat, p))) for n, p in parts])

    def barrier(self) -> None:
        """Wait until every worker is here; this worker's pushes have arrived by then.

        Raises:
            KVStoreError: an earlier push was refused.
        """
        self._requests.flush()
        if self._scheduler is not None:
            self._step([])
            if self._replaces:
                self._requests.ask([Call(s, messages.AtBarrier, ()) for s in self._keys.servers])
            call = Call(self._scheduler, messages.Barrier, (self._barriers,))
            (done,) = self._requests.ask([call])
            assert isinstance(done, Reply)
            self._barriers = done.version

    _barrier = barrier  # MXNet's name

    def note(self, name: str, text: str | None = None) -> str:
        """A text that the workers of this run store under a name; "" if there is none.

        Args:
            name: of the text.
            text: to store there from now on; None to read it.
        """
        if self._scheduler is None:
            raise KVStoreError(f'a "{self.type}" store has no other workers to leave notes for.')
        (stored,) = self._requests.ask([Call(self._scheduler, messages.Note, (name, text))])
        assert isinstance(stored, messages.NoteStored)
        return stored.text

    # -- where things are -------------------------------------------------------

    def key_map(self, keys: Keys | None = None) -> dict[Key, list[Part]]:
        """The server (numbered from 0) of each part of each key.

        Args:
            keys: a key or a list of keys; by default all that this worker has used.

        Raises:
            KVStoreError: a key is not initialised.
        """
        wanted = list(self._keys.layouts) if keys is None else each(keys)
        return {k: [part for _, part in self._keys.parts(k)] for k in wanted}

    def close(self, *, flush: bool = True) -> None:
        """End the connections, by default when all pushes have arrived: at the end of a run.

        Raises:
            KVStoreError: a push was refused.
        """
        try:
            if flush:
                for end in self.at_end:
                    end()
                self._requests.flush()
        finally:
            self._requests.close()

    def _step(self, keys: list[Key], layouts: Iterable[Layout] = ()) -> None:
        """A call with these keys, which sends or gets such tensors, is one step."""
        if gates and self._scheduler is not None:  # else there is nobody to ask
            self._requests.step = Step.of(keys, sum(layout.nbytes for layout in layouts))
