"""Synchronous strategies, whose replicas combine their gradients before each step.

The strategies differ in where they keep variables and in how they sum gradients.
"""

from __future__ import annotations

import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distkit.algorithms.use import implementation
from distkit.errors import StrategyError, TrainingError
from distkit_strategies.replica import ReplicaContext
from distkit_strategies.strategy import ReplicatedStrategy, Strategy
from distkit_strategies.tf_config import TFConfig, join
from distkit_strategies.variables import CreatedVariables, owner_of, parameters_of

#: TensorFlow's names for all-reduce algorithms, mapped to distkit's names.
CROSS_DEVICE_OPS: dict[Any, str] = {
    "NcclAllReduce": "native",
    "HierarchicalCopyAllReduce": "hierarchical",
    "ReductionToOneDevice": "reduce_broadcast",
    "reduce_to_one": "reduce_broadcast",
}


def strategy_parameters(strategy: Strategy, optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, which must all be variables of the strategy.

    Raises:
        StrategyError: a parameter was not created in the strategy's scope, or is on a different
            device.
    """
    weights = parameters_of(optimizer)
    for k, w in enumerate(weights):
        owner = owner_of(w)
        if owner is None or owner[0] is not strategy:
            origin = "outside of any scope" if owner is None else f"in the scope of {owner[0]}"
            raise StrategyError(
                f"{type(optimizer).__name__}.step() in {strategy}.run would update parameter {k}, "
                f"of shape {tuple(w.shape)}, which was created {origin}: its values may differ "
                f"between replicas. Create the model in `with strategy.scope():`."
            )
    strategy._check_devices((owner_of(w)[1], w) for w in weights)  # type: ignore[index]
    return weights


@torch.no_grad()
def combine(
    strategy: Strategy,
    weights: Sequence[Tensor],
    replica: ReplicaContext,
    all_reduce: Callable[[Tensor], Any],
    kind: str = "replica",
    first: int = 0,
) -> None:
    """Replace each gradient with the gradient of the global batch, Σ n_r g_r / Σ n_r or Σ g_r.

    Args:
        strategy: the strategy, which compares the replicas before gradients are sent.
        weights: the parameters, the same on all replicas.
        replica: this replica, with its rows n_r and the kind of its loss.
        all_reduce: a function that sums a tensor over the replicas, in place.
        kind: the name of a replica in messages.
        first: the number of the first replica.

    Raises:
        StrategyError: a replica has different parameters, or is not inside the same step; raised on
            all replicas.
        TrainingError: a replica has a gradient that is not finite; raised on all replicas.
    """
    check_losses(replica)
    for w in weights:
        w.grad = None if w.grad is None else w.grad.to_dense()
    rows, has_gradient = (
        1 if replica.rows is None else replica.rows,
        [w.grad is not None for w in weights],
    )
    bad = first_not_finite(w.grad for w in weights) if rows else -1  # the mean over no rows is NaN
    local = [rows, replica.summed, len(weights), zlib.crc32(bytes(has_gradient)), bad]
    gathered = strategy._compare("optimizer.step", local)
    for r, (_, summed, count, _, bad) in enumerate(gathered):
        if count != len(weights) or summed != gathered[0][1]:
            raise StrategyError(
                f"The {kind}s' optimizers update different parameters, or only some of the {kind}s "
                "used compute_average_loss. All replicas must run the same step."
            )
        if bad >= 0:
            raise_not_finite(weights[bad], replica, first + r, kind)
    if strategy._single_replica:
        return
    if len({s[3] for s in gathered}) > 1:
        masks = strategy._all_gather(
            torch.tensor(has_gradient, dtype=torch.uint8, device=strategy.device)
        )
        for w, needed in zip(weights, torch.stack(masks).any(0).tolist(), strict=True):
            w.grad = torch.zeros_like(w) if needed and w.grad is None else w.grad
    weight = 1 if replica.summed else rows / (sum(s[0] for s in gathered) or 1)
    gradients = [w.grad for w in weights if w.grad is not None]
    apply_flattened(gradients, lambda g: all_reduce(g.mul_(weight) if rows else g.zero_()))


def check_losses(replica: ReplicaContext) -> None:
    """Raise StrategyError if a scaled regularization loss is combined with a mean loss."""
    if replica.scaled and not replica.summed:
        raise StrategyError(
            "scale_regularization_loss was used in a step with a mean loss, so the mean over "
            "replicas divides the regularization twice. Use compute_average_loss for the other "
            "loss, or do not scale the regularization."
        )


def apply_flattened(tensors: Sequence[Tensor], function: Callable[[Tensor], Any]) -> None:
    """Apply an in-place function to all tensors, flattened into one tensor per dtype."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        group = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in group])
        function(flat)
        for t, result in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(result.view_as(t))


def first_not_finite(gradients: Iterable[Tensor | None]) -> int:
    """Return the index of the first gradient that is NaN or infinite; -1 if all are finite."""
    bad = (k for k, g in enumerate(gradients) if g is not None and not g.isfinite().all())
    return next(bad, -1)


def raise_not_finite(
    weight: Tensor, replica: ReplicaContext, culprit: int | None, kind: str = "replica"
) -> NoReturn:
    """Raise the error for a gradient that is NaN or infinite.

    Args:
        weight: the parameter.
        replica: this replica, for the number of the run.
        culprit: the number of the replica with the gradient; None if only the sum is not finite.
        kind: the name of a replica in messages.

    Raises:
        TrainingError: always.
    """
    layer = owner_of(weight)[1]  # type: ignore[index]
    where = "when summed over all replicas" if culprit is None else f"on {kind} {culprit}"
    raise TrainingError(
        f"The gradient of {layer} is not finite {where} in run {replica.number} of the strategy. "
        "The step was not applied. Look for NaN in the batch, or lower the learning rate.",
        rank=culprit or 0,
        step=replica.number,
        layer=layer,
    )


# -- the strategies ------------------------------------------------------------------------------


class OneDeviceStrategy(Strategy):
    """One replica on a requested device, where variables are created and batches prefetched.

    A program written for this strategy runs unchanged under the other strategies.

    Args:
        device: the device, such as "cpu" or "cuda:1".

    Raises:
        StrategyError: the device does not exist.

    >>> OneDeviceStrategy("cpu").num_replicas_in_sync
    1
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        if not _is_present(torch.device(device)):
            raise StrategyError(
                f"Device {device} does not exist on this machine. Available: {_device_names()}."
            )


class MirroredStrategy(ReplicatedStrategy):
    """Synchronous training; all-reduce keeps the copies of each variable on all replicas identical.

    At the end of the scope, all replicas get rank 0's values. Before each step, the gradients of
    all replicas are summed. Every replica then applies the same step.

    Args:
        devices: the device of each rank, such as ["cuda:0", "cuda:1"]; None for the device of the
            process group. Missing devices are skipped with a warning. With fewer devices than
            ranks, ranks share them round-robin, with a warning.
        cross_device_ops: the all-reduce of gradients: "native" (the backend's),
            "hierarchical", "reduce_to_one" or TensorFlow's names for them, another name in
            :data:`~distkit.algorithms.all_reduce.ALL_REDUCES`, "auto", "shared_memory", or a
            function with the contract of ``dist.all_reduce``.

    Raises:
        StrategyError: none of the devices exists.
        ValueError: the algorithm is unknown.

    Source:
        TensorFlow, ``tf.distribute.MirroredStrategy``; Goyal et al., 2017.

    Example:
        >>> def train(strategy):
        ...     with strategy.scope():
        ...         model = torch.nn.Linear(2, 1)
        ...     return strategy.num_replicas_in_sync
        >>> cluster.run(train, MirroredStrategy()).results            # doctest: +SKIP
        [4, 4, 4, 4]
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str] | None = None,
        cross_device_ops: str | Callable[..., Any] = "native",
    ) -> None:
        super().__init__()
        self._devices = [] if devices is None else _existing_devices(devices)
        name = CROSS_DEVICE_OPS.get(cross_device_ops, cross_device_ops)
        self._all_reduce_gradients = dist.all_reduce if name == "native" else implementation(name)

    def _after_scope(self, created: CreatedVariables) -> None:
        replicas, devices = self.num_replicas_in_sync, self._devices
        if self._chief and 0 < len(devices) < replicas:
            warnings.warn(
                f"There are {replicas} replicas, one per rank, but fewer devices: replica r uses "
                f"device r mod {len(devices)} of {', '.join(map(str, devices))}. Choose "
                "a device for each rank, or start fewer ranks.",
                stacklevel=2,
            )
        super()._after_scope(created)

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        weights = strategy_parameters(self, optimizer)
        if not self._single_replica:
            combine(self, weights, replica, self._all_reduce_gradients)


class CommunicationImplementation(str, Enum):
    """The algorithm that all-reduces gradients over the workers.

    ====  =====================================================================================
    AUTO  NCCL between GPUs; else :func:`~distkit.algorithms.use.auto_all_reduce`
    RING  distkit's ring, :func:`~distkit.algorithms.all_reduce.ring.ring_all_reduce`
    NCCL  NCCL's all-reduce; needs GPUs
    ====  =====================================================================================
    """

    AUTO, RING, NCCL = "AUTO", "RING", "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How workers exchange gradients.

    Args:
        bytes_per_pack: maximum size of a message with gradients [bytes]; 0 for no limit.
        implementation: "RING", "NCCL" or "AUTO".

    Raises:
        ValueError: a number is negative, or the implementation is unknown.

    Source:
        TensorFlow, ``tf.distribute.experimental.CommunicationOptions``.
    """

    bytes_per_pack: int = 0
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        CommunicationImplementation(self.implementation)
        if self.bytes_per_pack < 0:
            raise ValueError(
                "CommunicationOptions needs a bytes_per_pack of at least 0; got "
                f"{self.bytes_per_pack}."
            )


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Synchronous training on several workers: :class:`MirroredStrategy` over all their replicas.

    In a separate script, the strategy reads its task from ``TF_CONFIG``, if set, and connects to
    the other workers through torch's TCPStore at the address of worker 0.

    Args:
        communication_options: options for the all-reduce of gradients.

    Raises:
        StrategyError: ``TF_CONFIG`` is malformed, or this process cannot join the other workers;
            or, in a step, NCCL is requested but unavailable.

    Source:
        TensorFlow, ``tf.distribute.MultiWorkerMirroredStrategy``.

    >>> MultiWorkerMirroredStrategy(CommunicationOptions(implementation="RING")).options
    CommunicationOptions(bytes_per_pack=0, implementation='RING')
    """

    def __init__(self, communication_options: CommunicationOptions | None = None) -> None:
        super().__init__(cross_device_ops=self._all_reduce_in_packs)
        self.options = communication_options or CommunicationOptions()
        config = None if dist.is_initialized() else TFConfig.from_environment()
        if config is not None and config.workers:
            join(config)

    def _all_reduce_in_packs(self, x: Tensor) -> None:
        size = self.options.bytes_per_pack // x.element_size()
        for pack in x.split(max(size, 1)) if self.options.bytes_per_pack else (x,):
            self._all_reduce_pack(pack)

    @cached_property
    def _all_reduce_pack(self) -> Callable[..., Any]:
        requested = CommunicationImplementation(self.options.implementation)
        on_gpus = dist.get_backend() == "nccl"
        if requested is CommunicationImplementation.NCCL and not on_gpus:
            raise StrategyError(
                f"CommunicationOptions requests NCCL, but these ranks use {dist.get_backend()}. "
                "Start them on GPUs with backend nccl, or choose RING or AUTO."
            )
        if requested is CommunicationImplementation.RING:
            return implementation("ring")
        return dist.all_reduce if on_gpus else implementation("auto")


class TPUStrategy(MirroredStrategy):
    """:class:`MirroredStrategy` over XLA devices, one replica on each core.

    Run it in the processes that ``torch_xla`` starts, one for each core. The XLA backend of the
    process group sums the gradients. This strategy has not been tested on a TPU.

    Raises:
        StrategyError: ``torch_xla`` is not installed.

    Source:
        TensorFlow, ``tf.distribute.TPUStrategy``; PyTorch/XLA, "xla" backend.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("torch_xla") is None:
            raise StrategyError(
                "TPUStrategy needs torch_xla, which is not installed, and a TPU. Use "
                "MirroredStrategy() to run the same program on CPUs and GPUs."
            )
        super().__init__()
        self._devices = [torch.device("xla")]  # this process's device


class CentralStorageStrategy(ReplicatedStrategy):
    """Synchronous training with variables on rank 0 and computation on all ranks.

    Before each step, the gradients of all replicas are summed on rank 0. Only rank 0 keeps the
    optimizer's state and applies the step. It then broadcasts the new values. The result is the
    same as in one process. In contrast to :class:`MirroredStrategy`, all messages go to or from
    rank 0.

    Source:
        TensorFlow, ``tf.distribute.experimental.CentralStorageStrategy``.

    Example:
        >>> cluster.run(train, CentralStorageStrategy())              # doctest: +SKIP
    """

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        weights = strategy_parameters(self, optimizer)
        if self._single_replica:
            return
        combine(self, weights, replica, _reduce_to_0)
        self._updated_weights = [w for w in weights if w.grad is not None]
        if self._replica:
            optimizer.zero_grad()  # this rank applies no step

    @torch.no_grad()
    def _after_optimizer_step(self) -> None:
        if not self._single_replica:
            self._compare("optimizer.step", [])  # rank 0's step may have raised
            apply_flattened(self._updated_weights, partial(dist.broadcast, src=0))

    def _after_load(self, optimizer: Optimizer | None) -> None:
        if optimizer is not None and not self._chief:
            optimizer.state.clear()  # only the chief applies steps


def _reduce_to_0(x: Tensor) -> None:
    dist.reduce(torch.view_as_real(x) if x.is_complex() else x, 0)


def _is_present(device: torch.device) -> bool:
    """Return whether this machine has the device."""
    backend: Any = getattr(torch, device.type, None)
    count = backend.device_count() if hasattr(backend, "device_count") else 0
    return device.type == "cpu" or (device.index or 0) < count


def _device_names() -> str:
    """Return the names of this machine's devices."""
    return ", ".join(["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))])


def _existing_devices(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """Return the devices that exist; rank 0 warns about missing ones."""
    requested = [torch.device(d) for d in devices]
    present = [d for d in requested if _is_present(d)]
    missing = ", ".join(str(d) for d in requested if d not in present)
    if not present:
        raise StrategyError(
            f"This machine does not have the requested devices: {missing}. "
            f"Available: {_device_names()}."
        )
    if missing and not (dist.is_initialized() and dist.get_rank()):
        message = f"Devices that do not exist are skipped: {missing}. Available: {_device_names()}."
        warnings.warn(message, stacklevel=3)
    return present
