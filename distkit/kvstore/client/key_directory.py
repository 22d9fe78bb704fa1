"""A worker's view of the keys: layouts, places of their parts, versions last pulled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from distkit.kvstore.client.requests import Call, Requests
from distkit.kvstore.client.tensors import Keys, Values, each, pairs, whole, write
from distkit.kvstore.protocol.messages import Answer, Describe, Key, Pull, Reply
from distkit.kvstore.protocol.placement import Layout, Part, dtype_name, home, place

#: For each key the tensors to write its value to.
Outs: TypeAlias = "list[tuple[Key, list[Tensor]]]"


class KeyDirectory:
    """The servers of a store, as its worker sees them.

    ``layouts`` of the keys that it has used; ``versions`` that it last pulled, by key and
    server; ``dropped`` counts its gradients of each key that came too late for their round.

    Args:
        requests: carries what it asks.
        servers: the ids of the nodes that hold the values.
        bound: number of elements from which an array is split over all servers.
    """

    def __init__(self, requests: Requests, servers: Sequence[int], bound: int) -> None:
        self._requests, self.servers, self.bound = requests, servers, bound
        self.layouts: dict[Key, Layout] = {}
        self._parts: dict[Key, list[Part]] = {}
        self.versions: dict[tuple[Key, int], int] = {}
        self.dropped: dict[Key, int] = {}

    def _value(self, key: Key, part: Part, reply: Answer) -> Tensor:
        """Note the result of a pull: from now on gradients are computed from this version."""
        assert isinstance(reply, Reply) and reply.value is not None
        self.versions[key, part.server] = reply.version
        if reply.dropped:
            self.dropped[key] = reply.dropped
        return reply.value

    def values(self, keys: list[Key]) -> dict[Key, list[Tensor]]:
        """The parts of each key's value, all asked for at once."""
        keys = list(dict.fromkeys(keys))
        calls = [Call(self.node_of(p), Pull, (k,)) for k in keys for p in self.parts(k)]
        return self.taken(keys, self._requests.ask(calls))

    def taken(self, keys: list[Key], answers: Sequence[Answer]) -> dict[Key, list[Tensor]]:
        """The parts of each key's value, of the answers to its pulls, in the same order."""
        self._requests.check(keys)
        values: dict[Key, list[Tensor]] = {}
        answer = iter(answers)
        for k in keys:
            values[k] = [self._value(k, part, next(answer)) for part in self.parts(k)]
        return values

    def outs(self, key: Keys, out: Values | None) -> Outs | None:
        """The outputs for the values, checked; None if the values are to be returned."""
        if out is None:
            return None
        outs = pairs("pull", key, out)
        for k, tensors in outs:
            layout = self.layout(k)
            for tensor in tensors:
                layout.check("pull of", k, tensor.shape, layout.dtype)  # its dtype is converted
        return outs

    def hand_out(
        self, key: Keys, outs: Outs | None, values: dict[Key, list[Tensor]]
    ) -> Tensor | list[Tensor] | None:
        """Write what came, or return it."""
        if outs is not None:
            for k, tensors in outs:
                for tensor in tensors:
                    write(tensor, self.parts(k), values[k])
            return None
        found = [whole(values[k], self.layout(k).shape) for k in each(key)]
        return found if isinstance(key, (list, tuple)) else found[0]

    def fitting(self, what: str, found: list[tuple[Key, list[Tensor]]]) -> dict[Key, Layout]:
        """The layouts of these keys, which all their tensors have."""
        layouts = {k: self.layout(k, what) for k, _ in found}
        for k, tensors in found:
            for tensor in tensors:
                layouts[k].check(what, k, tensor.shape, dtype_name(tensor))
        return layouts

    def layout(self, key: Key, what: str = "pull of") -> Layout:
        """The layout of a key; asks its server if another worker initialised it."""
        if key not in self.layouts:
            call = Call(self.servers[home(key, len(self.servers))], Describe, (key, what))
            (answer,) = self._requests.ask([call])
            assert isinstance(answer, Reply) and answer.layout is not None
            self.layouts[key] = Layout(*answer.layout)
        return self.layouts[key]

    def parts(self, key: Key) -> list[Part]:
        """The places of its elements."""
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self.place(key, self.layout(key))
        return found

    def place(self, key: Key, layout: Layout) -> list[Part]:
        """The places of the elements of a key, initialised or not."""
        return place(key, layout.size, len(self.servers), self.bound)

    def held_by(self, server: int) -> list[Key]:
        """The keys that this worker has used and of which this server has a part."""
        return [k for k in self.layouts if any(self.node_of(p) == server for p in self.parts(k))]

    def node_of(self, part: Part) -> int:
        """The id of the server that has the part."""
        return self.servers[part.server]
