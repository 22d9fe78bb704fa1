"""Registration of a strategy's variables, checks of optimizer steps, and synchronization.

A scope uses torch's registration hooks to find the parameters and buffers of any model.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from distkit.errors import StrategyError
from distkit_strategies.replica import ReduceOp, current_replica, get_strategy

if TYPE_CHECKING:
    from distkit_strategies.strategy import Strategy

#: Strategy and name of each variable; weak references, since a strategy may hold its variables.
_owners: Any = WeakTensorKeyDictionary()
#: Key in a state dict's metadata that marks values aggregated over all replicas.
_AGGREGATED = "of_all_replicas"


@dataclass
class CreatedVariables:
    """The variables created in a scope.

    Args:
        tensors: the parameters and buffers, with their names.
        roots: the models: modules that have parameters and are not part of other modules.
    """

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    roots: WeakValueDictionary[int, nn.Module] = field(default_factory=WeakValueDictionary)


def owner_of(tensor: Tensor) -> tuple[Strategy, str] | None:
    """Return the strategy and name of a variable; None for any other tensor."""
    owner, name = _owners.get(tensor, (lambda: None, ""))
    strategy = owner()
    return None if strategy is None else (strategy, name)


def register_variable(tensor: Tensor, strategy: Strategy, name: str) -> None:
    """Register a tensor as a variable of a strategy."""
    _owners[tensor] = ref(strategy), name


@contextmanager
def watch_modules(strategy: Strategy) -> Iterator[CreatedVariables]:
    """Collect the parameters and buffers that modules register in the context.

    Raises:
        StrategyError: a parameter is lazy, so it has no value to share yet.
    """
    registered: dict[tuple[int, str], nn.Module] = {}

    def record(owner: nn.Module, name: str, value: Any) -> None:
        registered[id(owner), name] = owner

    handles = [
        hooks.register_module_parameter_registration_hook(record),
        hooks.register_module_buffer_registration_hook(record),
        hooks.register_module_module_registration_hook(record),
    ]
    created, children = CreatedVariables(), set[int]()
    try:
        yield created
    finally:
        for handle in handles:
            handle.remove()
    for (_, name), owner in registered.items():  # at the end, since ``.double()`` replaces buffers
        value = {**owner._parameters, **owner._buffers, **owner._modules}.get(name)
        full_name = f"{type(owner).__name__}.{name}"
        if isinstance(value, nn.Module):
            children.add(id(value))
        elif value is not None and owner_of(value) is None:
            if is_lazy(value):
                raise StrategyError(
                    f"{full_name} has no shape yet: it belongs to a lazy module. Call the model "
                    "once with an example inside the scope, so that every replica gets the same "
                    "initial weights."
                )
            register_variable(value, strategy, full_name)
            created.tensors.append((full_name, value))
    owners = {id(owner): owner for owner in registered.values() if id(owner) not in children}
    created.roots.update(
        {n: m for n, m in owners.items() if next(m.parameters(), None) is not None}
    )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer updates, in its order."""
    return [w for group in optimizer.param_groups for w in group["params"]]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check each ``optimizer.step()`` in this process, and synchronize the replicas before it.

    Raises:
        StrategyError: the step updates a variable outside ``run``, or has a closure under a
            strategy with several replicas.
    """
    replica, closure = current_replica(), (args[1:2] or (kwargs.get("closure"),))[0]
    if replica is None:
        _check_outside(optimizer)
    elif closure is None or replica.strategy._single_replica:
        replica.strategy._synchronize(optimizer, replica)
    else:
        raise StrategyError(
            f"{type(optimizer).__name__}.step(closure) was called under {replica.strategy}, but a "
            "closure computes the gradients of this replica only. Compute them first, then call "
            "step() without a closure."
        )


def _check_outside(optimizer: Optimizer) -> None:
    """Reject a step outside ``run``.

    A step with learning rate 0 is allowed, because torch uses it to initialize optimizer state.
    """
    owner = next(filter(None, map(owner_of, parameters_of(optimizer))), None)
    updates = any(group.get("lr", 1) for group in optimizer.param_groups)
    if owner is not None and updates and not owner[0]._steps_outside_run:
        raise StrategyError(
            f"{type(optimizer).__name__}.step() was called outside `run`: it updates {owner[1]}, a "
            f"variable of {owner[0]}, with the gradients of this replica only. Call it in the "
            "function passed to strategy.run."
        )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Run after each ``optimizer.step()`` in this process."""
    if (replica := current_replica()) is not None:
        replica.strategy._after_optimizer_step()


def _before_parameter(owner: nn.Module, name: str, parameter: Any) -> None:
    """Run before a module in this process registers a parameter."""
    replica, new = current_replica(), parameter is not None and owner_of(parameter) is None
    if new and replica is not None and not replica.strategy._steps_outside_run:
        raise StrategyError(
            f"{type(owner).__name__}.{name} was created inside `run` of {replica.strategy}, so its "
            "initial values differ between replicas. Create the model before the run, in "
            "`with strategy.scope():`."
        )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
hooks.register_module_parameter_registration_hook(_before_parameter)


class Mean(float):
    """A mean as a float, with the number of rows from which it was computed."""


def with_rows(result: Any, rows: int | None) -> Any:
    """Detach a result of ``run``, and attach the number of rows from which it was computed."""
    result = Mean(result) if type(result) is float else result
    result = result.detach() if isinstance(result, Tensor) else result
    if rows is not None and isinstance(result, Tensor | Mean):
        result._rows = rows  # type: ignore[union-attr]
    return result


# -- values with a copy on each replica --------------------------------------------------------


class VariableSynchronization(str, Enum):
    """When the copies of a variable are synchronized.

    ========  ==================================================================================
    AUTO      like ON_WRITE
    NONE      like ON_READ
    ON_WRITE  at each assignment: the copies are always identical
    ON_READ   when read outside ``run``: replicas change only their own copies (for statistics)
    ========  ==================================================================================

    Source:
        TensorFlow, ``tf.VariableSynchronization``.
    """

    AUTO, NONE, ON_WRITE, ON_READ = "AUTO", "NONE", "ON_WRITE", "ON_READ"


class VariableAggregation(str, Enum):
    """How different values of the replicas are aggregated.

    Source:
        TensorFlow, ``tf.VariableAggregation``.
    """

    NONE, SUM, MEAN, ONLY_FIRST_REPLICA = "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"


class Variable(nn.Module):
    """A value with a copy on each replica, such as a metric or a counter.

    A variable that is created in a scope or in ``run`` starts with rank 0's value on all replicas.
    ``value`` is this replica's copy. If the variable is an attribute of a module, it is part of the
    module's ``state_dict``. A checkpoint has one value for all replicas; loading divides a sum
    among the replicas again.

    ``trainable`` is not supported, since no optimizer updates a variable. Use an ``nn.Parameter``.
    Arithmetic such as ``seen + 1`` is not supported either, since reading an ON_READ variable sends
    messages. Write ``seen.read_value() + 1``.

    Args:
        value: the initial value.
        synchronization: when the copies are synchronized.
        aggregation: how different copies are aggregated.

    Raises:
        StrategyError: integers have the aggregation MEAN, or only some replicas create the
            variable in ``run``.

    Source:
        TensorFlow, ``tf.Variable`` under ``tf.distribute``.

    >>> seen = Variable(0, synchronization="ON_READ", aggregation="SUM")
    >>> seen.assign_add(3)
    >>> seen.read_value()
    tensor(3)
    """

    value: Tensor

    def __init__(
        self,
        value: Any,
        *,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        super().__init__()
        self.strategy = get_strategy()
        self.synchronization = VariableSynchronization(synchronization)
        self.aggregation = VariableAggregation(aggregation)
        initial = self.strategy._tensor("Variable", value).detach().clone()
        if self.aggregation is VariableAggregation.MEAN and _is_integral(initial):
            raise StrategyError(
                f"A variable of {initial.dtype} cannot have aggregation MEAN, since the mean of "
                "integers may be fractional. Use a floating-point dtype, SUM or ONLY_FIRST_REPLICA."
            )
        self.register_buffer("value", initial)
        if current_replica() is not None:  # otherwise at the end of the scope
            register_variable(initial, self.strategy, "Variable.value")
            self.strategy._after_scope(CreatedVariables([("Variable.value", initial)]))

    def assign(self, value: Any) -> None:
        """Replace the value."""
        self.value.copy_(self._delta(value))

    def assign_add(self, delta: Any) -> None:
        """Add to the value.

        Raises:
            StrategyError: a replica changes an ON_WRITE variable that has no aggregation.
        """
        self.value.add_(self._delta(delta))

    def assign_sub(self, delta: Any) -> None:
        """Subtract from the value."""
        self.value.sub_(self._delta(delta))

    def read_value(self) -> Tensor:
        """Return this replica's copy in ``run``, and the aggregated value elsewhere.

        Raises:
            StrategyError: the copies may differ, and the variable has no aggregation.
        """
        if self._copies_may_differ and current_replica() is None:
            return _aggregate(self.strategy, self.value, self.aggregation)
        return self.value.clone()

    @property
    def _copies_may_differ(self) -> bool:
        unsynchronized = VariableSynchronization.NONE, VariableSynchronization.ON_READ
        return self.synchronization in unsynchronized and not self.strategy._single_replica

    def _delta(self, value: Any) -> Tensor:
        """Return the value that this replica assigns or adds to its copy."""
        x = self.strategy._tensor("assign", value, self.value.dtype)
        if current_replica() is None:  # the same on all replicas
            return self._share(x)
        if self._copies_may_differ or self.strategy._single_replica:
            return x
        return _aggregate(self.strategy, x, self.aggregation)

    def _share(self, total: Tensor) -> Tensor:
        """Return this replica's share of a value for all replicas; only sums are divided.

        The shares add up exactly, and differ by at most one unit in the last place.
        """
        if not (self._copies_may_differ and self.aggregation is VariableAggregation.SUM):
            return total
        if total.is_complex():
            return torch.view_as_complex(self._share(torch.view_as_real(total)))
        replicas, integral = self.strategy.num_replicas_in_sync, _is_integral(total)
        digit = 1 if integral else total - torch.nextafter(total, torch.zeros_like(total))
        units = total // digit
        share = (units // replicas + (units % replicas > self.strategy._replica)) * digit
        return share if integral else torch.where(share.isfinite(), share, total / replicas)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        key = f"{prefix}value"
        if local_metadata.get(_AGGREGATED) and key in state_dict:
            state_dict = {**state_dict, key: self._share(state_dict[key])}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _is_integral(x: Tensor) -> bool:
    """Return whether a tensor has an integer dtype."""
    return not (x.is_floating_point() or x.is_complex())


def _aggregate(strategy: Strategy, x: Tensor, aggregation: VariableAggregation) -> Tensor:
    """Return the aggregate of all replicas' values.

    Raises:
        StrategyError: the aggregation is NONE.
    """
    if aggregation is VariableAggregation.NONE:
        raise StrategyError(
            "The replicas may have different values, but the variable's aggregation is NONE. "
            "Create it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA."
        )
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA and strategy._replica:
        x = torch.zeros_like(x)
    op = ReduceOp.MEAN if aggregation is VariableAggregation.MEAN else ReduceOp.SUM
    return strategy._reduce("all_reduce", op, x.detach()).to(x.dtype)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, VariableAggregation]]:
    """Yield each buffer with its name and aggregation.

    Floating-point buffers are averaged, because the statistics of batch normalization differ
    between replicas. Other buffers are copied from the first replica. A :class:`Variable` sets its
    own aggregation.
    """
    first, mean = VariableAggregation.ONLY_FIRST_REPLICA, VariableAggregation.MEAN
    for path, owner in model.named_modules():
        for name, tensor in owner.named_buffers(recurse=False):
            aggregation = mean if tensor.is_floating_point() else first
            if isinstance(owner, Variable):
                aggregation = owner.aggregation if owner._copies_may_differ else first
            yield ".".join(filter(None, (path, name))), tensor, aggregation


def _aggregate_if_different(
    strategy: Strategy, tensor: Tensor, aggregation: VariableAggregation
) -> Tensor:
    """Return the aggregate of all replicas; identical copies are only sent if they are summed."""
    content = tensor.cpu().reshape(-1).contiguous().view(torch.uint8)  # numpy has no bfloat16
    gathered = strategy._compare("buffers", [zlib.crc32(content.numpy().tobytes())])
    if aggregation is not VariableAggregation.SUM and gathered.count(gathered[0]) == len(gathered):
        return tensor.clone()
    return _aggregate(strategy, tensor, aggregation)


@torch.no_grad()
def synchronize_buffers(strategy: Strategy, model: nn.Module) -> None:
    """Make the buffers identical on all replicas, so that evaluation gives the same result on each.

    Each replica keeps its own copy of a variable with aggregation SUM or NONE.
    """
    for _, tensor, aggregation in _buffers(model):
        if aggregation not in (VariableAggregation.SUM, VariableAggregation.NONE):
            tensor.copy_(_aggregate_if_different(strategy, tensor, aggregation))


@torch.no_grad()
def state_dict(strategy: Strategy, model: nn.Module) -> dict[str, Any]:
    """Return a model's state, aggregated over all replicas, for a checkpoint.

    ``model.load_state_dict`` divides a sum among the replicas.
    """
    state = model.state_dict()
    saved = (
        (name, tensor, aggregation)
        for name, tensor, aggregation in _buffers(model)
        if name in state
    )
    return as_global_state(
        model,
        {
            **state,
            **{n: _aggregate_if_different(strategy, t, aggregation) for n, t, aggregation in saved},
        },
    )


def as_global_state(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state, marked as aggregated over all replicas."""
    state = cast(Any, OrderedDict(values))
    metadata = cast(Any, model.state_dict())._metadata
    state._metadata = {path: {**entry, _AGGREGATED: True} for path, entry in metadata.items()}
    return cast(dict[str, Any], state)
