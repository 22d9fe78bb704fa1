"""Strategies that distribute a training loop; one line selects the strategy.

::

    def train(strategy):
        with strategy.scope():
            model = torch.nn.Linear(64, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):                              # plain torch code for one replica
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for x, y in strategy.distribute_dataset(data, global_batch=128):
            loss = strategy.run(step, args=(x, y))
            mean = strategy.reduce("mean", loss)

    cluster.run(train, dk.strategies.MirroredStrategy())

In most strategies, each rank is a replica. :class:`Strategy` documents the interface of all
strategies.
"""

from distkit.data import AutoShardPolicy
from distkit_strategies.checkpoint import load, load_weights, save, save_weights
from distkit_strategies.coordinator import ClusterCoordinator, RemoteValue
from distkit_strategies.fully_sharded import FullyShardedStrategy
from distkit_strategies.model import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRate,
    Model,
    TensorBoard,
)
from distkit_strategies.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ParameterServerStrategy,
)
from distkit_strategies.replica import (
    ReduceOp,
    ReplicaContext,
    compute_average_loss,
    get_replica_context,
    get_strategy,
    scale_regularization_loss,
)
from distkit_strategies.strategy import InputContext, Strategy
from distkit_strategies.synchronous import (
    CentralStorageStrategy,
    CommunicationImplementation,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    TPUStrategy,
)
from distkit_strategies.table import support
from distkit_strategies.tf_config import TFConfig
from distkit_strategies.variables import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    state_dict,
    synchronize_buffers,
)

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
    "TFConfig",
    "TPUStrategy",
    "TensorBoard",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "compute_average_loss",
    "get_replica_context",
    "get_strategy",
    "load",
    "load_weights",
    "save",
    "save_weights",
    "scale_regularization_loss",
    "state_dict",
    "support",
    "synchronize_buffers",
]
