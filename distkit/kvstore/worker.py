"""The worker's side: the KVStore that training code calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore import messages, states
from distkit.kvstore.compression import Codec, Compression
from distkit.kvstore.devices import Traffic, add_up
from distkit.kvstore.messages import Key, Reply
from distkit.kvstore.optimizer import SLOTS, from_spec, to_spec
from distkit.kvstore.placement import Layout, Part
from distkit.kvstore.recording import Step, gates, stepped
from distkit.kvstore.requests import LETTER, Call, Requests
from distkit.kvstore.shards import Shards
from distkit.kvstore.tensors import Keys, Values, by_priority, cut, each, fresh, pairs


class KVStore:
    """Weights that several processes share: key → tensor. Made by :func:`distkit.kvstore.create`.

    Args:
        requests: carries what it asks.
        type: the name it was created by, such as "dist_sync".
        num_workers: how many workers share the store.
        servers: the ids of the nodes that hold it.
        scheduler: the id of the node where workers meet; None if there is one worker.
        bound: number of elements from which an array is split over all servers.
        check_finite: refuse gradients with NaN or infinity.
        elastic: workers may come later, so that servers are told who waits at a barrier.
        barriers: how many barriers the run has passed.

    >>> from distkit import kvstore
    >>> kv = kvstore.create("local")
    >>> kv.init("w", torch.zeros(2))
    >>> kv.push("w", [torch.ones(2), torch.ones(2)])     # a gradient from each of two devices
    >>> kv.pull("w")
    tensor([2., 2.])
    """

    def __init__(
        self, requests: Requests, *, type: str, num_workers: int, servers: Sequence[int],
        scheduler: int | None, bound: int, check_finite: bool = False,
        elastic: bool = False, barriers: int = 0,
    ) -> None:  # fmt: skip
        self._type, self._num_workers, self.bigarray_bound = type, num_workers, bound
        self._requests, self._scheduler = requests, scheduler
        self._shards = Shards(requests, servers, bound)
        self._check_finite, self._elastic, self._barriers = check_finite, elastic, barriers
        self._compression: Compression | None = None
        self._optimizer: tuple[str, dict[str, float]] | None = None
        #: What its pushes came to so far.
        self.traffic = Traffic()

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

    @property
    def dropped(self) -> dict[Key, int]:
        """This worker's gradients of each key that came too late for their round."""
        return dict(self._shards.dropped)

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
        layouts = {k: Layout.of(tensors[0]) for k, tensors in found}
        if gates:
            self._step([*layouts], layouts.values() if self.rank == 0 else ())
        self._requests.ask([call for k, tensors in found for call in self._inits(k, tensors)])
        self._shards.layouts |= layouts

    def broadcast(self, key: Keys, value: Values, out: Values) -> None:
        """An init, and a pull of worker 0's values into ``out``."""
        self.init(key, value)
        self.pull(key, out)

    def push(self, key: Keys, value: Values, priority: int | Sequence[int] = 0) -> None:
        """Send gradients to the servers, without waiting for them to arrive.

        Args:
            key: a key or a list of keys.
            value: for each key a tensor like the first, or a list of such: their sum is sent.
            priority: of the keys, or of each: keys of higher priority are sent first.

        Raises:
            KVStoreError: not initialised, or with another shape or dtype, or not finite where
                that is checked. What only a server can tell is raised by the next call on
                that key.
        """
        try:
            self._push(key, value, priority)
        finally:
            self._requests.dispatch()
        if gates and stepped():
            self._requests.arrive()  # what others push afterwards comes later

    def pull(
        self, key: Keys, out: Values | None = None, priority: int | Sequence[int] = 0
    ) -> Tensor | list[Tensor] | None:
        """Get the values; under ``dist_sync`` those with this worker's pushes merged in.

        Args:
            key: a key or a list of keys.
            out: for each key a tensor to write to, or a list of such.
            priority: of the keys, or of each: keys of higher priority are asked for first.

        Returns:
            The tensor, or the list of tensors, if there is no ``out``.

        Raises:
            KVStoreError: not initialised, ``out`` does not fit, or an earlier push was refused.
        """
        keys, outs = each(key), self._shards.outs(key, out)
        if gates:
            self._step(keys, map(self._shards.layout, keys))
        asked = [k for k, _ in by_priority([(k, None) for k in keys], priority)]
        return self._shards.hand_out(key, outs, self._shards.values(asked))

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Tensor | list[Tensor] | None:  # fmt: skip
        """A push, and a pull of what came of it: of small tensors both in one message."""
        if gates:  # two steps
            self.push(key, value, priority)
            return self.pull(key, out, priority)
        found = pairs("push", key, value)
        size = sum(tensors[0].nbytes for _, tensors in found)
        if size > LETTER or self._requests.clocks is not None:
            try:
                self._push(key, value, priority)
                return self.pull(key, out, priority)
            finally:
                self._requests.dispatch()
        outs, local = self._shards.outs(key, out), self._scheduler is None
        calls = list(self._calls(found, priority, copy=local))  # else they are left alone
        asked = [k for k, _ in by_priority(found, priority)]
        values = self._shards.taken(asked, self._requests.ride(calls))
        return self._shards.hand_out(key, outs, values)

    def row_sparse_pull(
        self, key: Key, out: Tensor | None = None, priority: int = 0, *, row_ids: Tensor
    ) -> Tensor | None:
        """Get some rows of a value: of an embedding those that the next batch needs.

        Args:
            key: a key whose value has rows, of shape ``(n, …)``.
            out: a tensor of that shape; only the rows are written.
            priority: as in :meth:`pull`; there is one key.
            row_ids: numbers of rows, in any order; int64[m].

        Returns:
            A sparse tensor of the value's shape that has these rows, if there is no ``out``.

        Raises:
            KVStoreError: not initialised, no such rows, or ``out`` does not fit.
        """
        layout = self._shards.layout(key)
        ids = torch.unique(row_ids.to("cpu", torch.int64))
        if not layout.shape or (len(ids) and (ids[0] < 0 or ids[-1] >= layout.shape[0])):
            raise KVStoreError(f"pull of rows {ids.tolist()[:9]} of {key!r}, which is {layout}.")
        if out is not None:
            self._shards.fitting("pull of", [(key, [out])])
        if gates:
            self._step([key], [layout])
        rows = self._shards.rows(key, ids, layout)
        if out is None:
            return torch.sparse_coo_tensor(
                ids[None], rows, layout.shape, is_coalesced=True, check_invariants=True
            )
        out.detach()[ids.to(out.device)] = rows.to(out.device)
        return None

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Send this worker's gradients in fewer bits; what is lost is added to the next push.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, or "1bit", or "topk" with
                the "ratio" of elements that are kept.

        Raises:
            KVStoreError: unknown type or parameter, or a store that sends nothing.
        """
        if self.type == "local":
            raise KVStoreError('set_gradient_compression on a "local" store, which sends nothing. '
                               'Use "device" or a "dist_…" store.')  # fmt: skip
        self._compression = Compression(Codec.of(compression_params))

    # -- updates ----------------------------------------------------------------

    def set_optimizer(self, optimizer: object, *, anew: bool = False) -> None:
        """Let the servers update the values with each gradient (or sum of gradients).

        Every worker calls it with the same optimizer, before the first push.

        Args:
            optimizer: such as ``kvstore.SGD(learning_rate=0.1)``.
            anew: change the one that the servers have; between two barriers, on one worker.

        Raises:
            KVStoreError: none that the servers know, or another than they have.
        """
        spec = to_spec(optimizer)
        fields = (*spec, int(anew))
        if gates:
            self._step([])
        self._requests.ask([Call(s, messages.SetOptimizer, fields) for s in self._shards.servers])
        self._optimizer = spec

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], None]) -> None:
        """Let a function of yours update the values, in a store of one process.

        Args:
            updater: called with key, gradient and value, which it changes in place.

        Raises:
            KVStoreError: a distributed store: code does not travel to servers.
        """
        if self.type.startswith("dist"):
            raise KVStoreError(
                f'set_updater on a "{self.type}" store: functions do not travel to the servers. '
                "Use kv.set_optimizer, or update on the workers: kvstore.Trainer(..., "
                "update_on_kvstore=False)."
            )
        self._requests.ask([Call(s, messages.SetUpdater, (updater,)) for s in self._shards.servers])

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Save what the optimizer keeps of each key that this worker has used.

        Args:
            fname: the file, written anew.
            dump_optimizer: save the optimizer's name and numbers, too.

        Raises:
            KVStoreError: no optimizer was set by this worker.
        """
        if self._optimizer is None:
            raise KVStoreError("save_optimizer_states without an optimizer. "
                               "Call kv.set_optimizer(...) first.")  # fmt: skip
        self._requests.flush()
        found: states.States = {}
        for k, slot in itertools.product(self._shards.layouts, SLOTS):
            answers = self._requests.ask([
                Call(self._shards.node_of(p), messages.GetState, (k, slot))
                for p in self._shards.parts(k)
            ])  # fmt: skip
            kept = [a.value for a in answers if isinstance(a, Reply) and a.value is not None]
            if kept:
                found[k, slot] = torch.cat(kept)
        states.write(fname, found, self._optimizer if dump_optimizer else None)

    def load_optimizer_states(self, fname: str) -> None:
        """Give the servers what :meth:`save_optimizer_states` saved: called by one worker.

        Raises:
            KVStoreError: no such file, or a key in it is not initialised here.
        """
        found, optimizer = states.read(fname)
        if optimizer is not None:
            self.set_optimizer(from_spec(*optimizer), anew=True)
        self._requests.ask([
            Call(self._shards.node_of(p), messages.SetState, (k, slot, value[p.start : p.stop]))
            for (k, slot), value in found.items() for p in self._shards.parts(k)
        ])  # fmt: skip

    def barrier(self) -> None:
        """Wait until every worker is here; this worker's pushes have arrived by then.

        Raises:
            KVStoreError: an earlier push was refused.
        """
        self._requests.flush()
        if self._scheduler is not None:
            if gates:
                self._step([])
            calls = [Call(self._scheduler, messages.Barrier, (self._barriers,))]
            if self._elastic:
                calls += [Call(s, messages.Rest, (self._barriers,)) for s in self._shards.servers]
            done = self._requests.ask(calls)[0]
            assert isinstance(done, Reply)
            self._barriers = done.version

    # -- where things are -------------------------------------------------------

    def key_map(self, keys: Keys | None = None) -> dict[Key, list[Part]]:
        """Which server (numbered from 0) holds which elements of which key.

        Args:
            keys: a key or a list of keys; by default all that this worker has used.

        Raises:
            KVStoreError: a key is not initialised.
        """
        wanted = list(self._shards.layouts) if keys is None else each(keys)
        return {k: self._shards.parts(k) for k in wanted}

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

    def _step(self, keys: list[Key], layouts: Iterable[Layout] = ()) -> None:
        """A call with these keys, which sends or gets such tensors, is one step."""
        if self._scheduler is not None:  # else there is nobody to ask
            self._requests.step = Step.of(keys, sum(layout.nbytes for layout in layouts))

    def _push(self, key: Keys, value: Values, priority: int | Sequence[int]) -> None:
        for call in self._calls(pairs("push", key, value), priority):
            self._requests.post(call)

    def _calls(
        self, found: list[tuple[Key, list[Tensor]]], priority: int | Sequence[int],
        *, copy: bool = True,
    ) -> Iterable[Call]:  # fmt: skip
        """The pushes of these gradients, in the order of their priority."""
        self._requests.check(k for k, _ in found)
        layouts = self._shards.fitting("push of", found)
        if gates:
            self._step([*layouts], layouts.values())
        for k, tensors in by_priority(found, priority):
            yield from self._pushes(k, layouts[k], self._gathered(k, tensors, copy))

    def _inits(self, key: Key, tensors: list[Tensor]) -> Iterable[Call]:
        if len(tensors) > 1:
            raise KVStoreError(f"init of {key!r} with {len(tensors)} tensors. Give one.")
        layout = Layout.of(tensors[0])
        flat = None
        if self.rank == 0:
            stays = self.type == "device"
            flat = add_up(tensors, "stay", Traffic()) if stays else fresh(tensors)
        for part in self._shards.place(key, layout):
            fields = key, layout.shape, layout.dtype, None if flat is None else cut(flat, part)
            yield Call(self._shards.node_of(part), messages.Init, fields)

    def _gathered(self, key: Key, tensors: list[Tensor], copy: bool) -> Tensor:
        """One gradient of those of the devices, flat."""
        place = "device" if self.type.endswith("_device") else "host"
        where = "stay" if self.type == "device" else place
        flat = add_up(tensors, where, self.traffic, copy=copy)
        if self._check_finite and not bool(torch.isfinite(flat).all()):
            raise KVStoreError(
                f"push of {key!r} on worker {self.rank} with NaN or infinity: the value would be "
                "so on every worker, for ever. Look for what made it, or lower the learning rate."
            )
        return flat

    def _pushes(self, key: Key, layout: Layout, flat: Tensor) -> Iterable[Call]:
        for part in self._shards.parts(key):
            version = self._shards.versions.get((key, part.server), 0)
            value, codec = cut(flat, part), ""
            if self._compression is not None:
                value = self._compression.pack(key, part.server, value)
                codec = str(self._compression.codec)
            self.traffic.sent += value.nbytes
            fields = (key, layout.shape, version, value, self._requests.settled, codec,
                      self._barriers)  # fmt: skip
            yield Call(self._shards.node_of(part), messages.Push, fields)
