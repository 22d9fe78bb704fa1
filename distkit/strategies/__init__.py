"""Strategies: one training loop, and one line that says how it is distributed.

::

    def train(strategy):
        with strategy.scope():
            model = torch.nn.Linear(64, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):                              # plain torch: one replica
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for x, y in strategy.distribute_dataset(data, global_batch=128):
            loss = strategy.run(step, args=(x, y))
            mean = strategy.reduce("mean", loss)

    cluster.run(train, dk.strategies.MirroredStrategy())

A replica is a rank. :class:`Strategy` says what a strategy does at which moment.
"""

from distkit.data.policies import AutoShardPolicy
from distkit.strategies.aggregation import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    state_dict,
    synchronize_buffers,
)
from distkit.strategies.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRate,
    TensorBoard,
)
from distkit.strategies.central_storage import CentralStorageStrategy
from distkit.strategies.checkpoint import load, load_weights, save, save_weights
from distkit.strategies.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from distkit.strategies.coordinator import ClusterCoordinator, RemoteValue
from distkit.strategies.fully_sharded import FullyShardedStrategy
from distkit.strategies.input import InputContext, InputOptions
from distkit.strategies.losses import compute_average_loss, scale_regularization_loss
from distkit.strategies.mirrored import MirroredStrategy
from distkit.strategies.model import Model
from distkit.strategies.multi_worker import (
    CommunicationImplementation,
    CommunicationOptions,
    MultiWorkerMirroredStrategy,
)
from distkit.strategies.one_device import OneDeviceStrategy
from distkit.strategies.parameter_server import ParameterServerStrategy
from distkit.strategies.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from distkit.strategies.strategy import Strategy
from distkit.strategies.table import Support, support
from distkit.strategies.tf_config import TFConfig
from distkit.strategies.tpu import TPUStrategy
from distkit.strategies.variables import ReduceOp

__all__ = [
    "AutoShardPolicy",
    "Callback",
    "CentralStorageStrategy",
    "Checkpoint",
    "ClusterCoordinator",
    "CommunicationImplementation",
    "CommunicationOptions",
    "EarlyStopping",
    "FixedShardsPartitioner",
    "FullyShardedStrategy",
    "InputContext",
    "InputOptions",
    "LearningRate",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MirroredStrategy",
    "Model",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "Strategy",
    "Support",
    "TFConfig",
    "TPUStrategy",
    "TensorBoard",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "compute_average_loss",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "load",
    "load_weights",
    "save",
    "save_weights",
    "scale_regularization_loss",
    "state_dict",
    "support",
    "synchronize_buffers",
]
