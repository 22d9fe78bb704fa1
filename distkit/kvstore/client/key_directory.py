"""The keys that a worker has initialised: their layouts, and the servers of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.placement import Layout, Part, dtype_name, place


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

    def check(self, what: str, found: list[tuple[Key, list[Tensor]]], *, dtype: bool) -> None:
        """Refuse tensors that do not have their key's shape, and ``dtype`` where that counts.

        Raises:
            KVStoreError: one does not, or its key is not initialised.
        """
        for key, tensors in found:
            layout = self.layout(key, what)
            for tensor in tensors:
                has = dtype_name(tensor) if dtype else layout.dtype
                layout.check(what, key, tensor.shape, has)
