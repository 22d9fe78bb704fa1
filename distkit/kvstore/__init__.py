"""The parameter server: servers hold the weights; workers pull them and push gradients.

There are three roles: *workers* train, *servers* hold the weights, and one *scheduler* sends every
node the addresses of the servers. On each worker::

    kv = kvstore.create("dist_sync")
    kv.init("w", w)
    kv.set_optimizer(kvstore.SGD(learning_rate=0.1))
    for inputs, targets in shard:
        w = kv.pull("w")
        kv.push("w", gradient(w, inputs, targets))

Continue in :mod:`distkit.kvstore.protocol.server`, then
:mod:`~distkit.kvstore.transport.scheduler`, then :mod:`~distkit.kvstore.client.worker`. Source: Li
et al., Scaling distributed machine learning with the parameter server, 2014; the names are Apache
MXNet's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.imports import attributes

if TYPE_CHECKING:
    from distkit.kvstore.client.tensors import split_and_load
    from distkit.kvstore.client.trainer import Trainer
    from distkit.kvstore.client.worker import KVStore, create, current_node, release, use
    from distkit.kvstore.protocol.optimizer import SGD, OptimizerSpec
    from distkit.kvstore.protocol.placement import Part
    from distkit.kvstore.transport.node import Node
    from distkit.kvstore.transport.service import Service

__all__ = [
    "SGD",
    "KVStore",
    "Node",
    "OptimizerSpec",
    "Part",
    "Service",
    "Trainer",
    "create",
    "current_node",
    "release",
    "split_and_load",
    "use",
]


_module_of = {
    name: f"distkit.kvstore.{module}"
    for module, names in {
        "client.tensors": ["split_and_load"],
        "client.trainer": ["Trainer"],
        "client.worker": ["KVStore", "create", "current_node", "release", "use"],
        "protocol.optimizer": ["SGD", "OptimizerSpec"],
        "protocol.placement": ["Part"],
        "transport.node": ["Node"],
        "transport.service": ["Service"],
    }.items()
    for name in names
}
__getattr__ = attributes(__name__, _module_of)
