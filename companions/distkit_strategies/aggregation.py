"""Values of which replicas hold different copies, and how these become one when they are read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn

from distkit.errors import StrategyError
from distkit_strategies import context
from distkit_strategies.collectives import all_reduce
from distkit_strategies.strategy import Strategy
from distkit_strategies.variables import Made, adopt

#: In the metadata of a state: its values are those of all replicas together.
_OF_ALL = "of_all_replicas"


class VariableSynchronization(str, Enum):
    """When the copies of a variable become one.

    ========  ==================================================================================
    AUTO      as ON_WRITE
    NONE      never: each replica has its own value
    ON_WRITE  at each assignment: the copies are always equal
    ON_READ   when a scope reads it: replicas change their copies alone. Fast, for statistics
    ========  ==================================================================================

    Source:
        TensorFlow, ``tf.VariableSynchronization``.
    """

    AUTO, NONE, ON_WRITE, ON_READ = "AUTO", "NONE", "ON_WRITE", "ON_READ"


class VariableAggregation(str, Enum):
    """How different values of the replicas become one.

    Source:
        TensorFlow, ``tf.VariableAggregation``.
    """

    NONE, SUM, MEAN, ONLY_FIRST_REPLICA = "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"


def aggregate(strategy: Strategy, x: Tensor, how: VariableAggregation) -> Tensor:
    """One value of those of all replicas.

    Raises:
        StrategyError: ``how`` is NONE.
    """
    if how is VariableAggregation.NONE:
        raise StrategyError(
            "The replicas have different values, and the variable's aggregation is NONE. Make it "
            "with aggregation SUM, MEAN or ONLY_FIRST_REPLICA."
        )
    if how is VariableAggregation.ONLY_FIRST_REPLICA and strategy._replica:
        x = torch.zeros_like(x)
    strategy._compare("all_reduce", x.shape)
    mean = how is VariableAggregation.MEAN
    parts = strategy.num_replicas_in_sync if mean else None
    return all_reduce(strategy, x.detach(), parts).to(x.dtype)


class Variable(nn.Module):
    """A value with a copy on each replica, such as a metric or a counter.

    Made in a scope or in ``run``, it begins with rank 0's value everywhere. ``value`` is this
    replica's copy. It can be an attribute of a module, and is in the module's ``state_dict``. A
    checkpoint has one value for all replicas; of a sum each replica gets its part back.

    Left out: ``trainable``, since no optimizer updates it (make an ``nn.Parameter`` for that), and
    arithmetic on the variable itself, such as ``seen + 1``, since reading an ON_READ variable sends
    messages: write ``seen.read_value() + 1``.

    Args:
        value: the first value.
        synchronization: when the copies become one.
        aggregation: how.

    Raises:
        StrategyError: a mean of whole numbers; in ``run``, only some replicas make it.

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
        self.strategy = context.get_strategy()
        self.synchronization = VariableSynchronization(synchronization)
        self.aggregation = VariableAggregation(aggregation)
        first = self.strategy._tensor("Variable", value).detach().clone()
        if self.aggregation is VariableAggregation.MEAN and _counts(first):
            raise StrategyError(
                f"A variable of {first.dtype} with aggregation MEAN: a mean of whole numbers need "
                "not be one. Make it of floating-point numbers, or use SUM or ONLY_FIRST_REPLICA."
            )
        self.register_buffer("value", first)
        if context.replica() is not None:  # elsewhere its scope does so when it ends
            adopt(first, self.strategy, "Variable.value")
            self.strategy._created([Made("Variable.value", first, trains=False)])

    def assign(self, value: Any) -> None:
        """Replace the value."""
        self.value.copy_(self._change(value))

    def assign_add(self, delta: Any) -> None:
        """Add to the value.

        Raises:
            StrategyError: a replica writes an ON_WRITE variable without an aggregation.
        """
        self.value.add_(self._change(delta))

    def assign_sub(self, delta: Any) -> None:
        """Subtract from the value."""
        self.value.sub_(self._change(delta))

    def read_value(self) -> Tensor:
        """In a replica its own copy; elsewhere the one value of all replicas.

        Raises:
            StrategyError: the copies differ, and there is no aggregation.
        """
        if self._own_copies and context.replica() is None:
            return aggregate(self.strategy, self.value, self.aggregation)
        return self.value.clone()

    @property
    def _own_copies(self) -> bool:
        alone = VariableSynchronization.NONE, VariableSynchronization.ON_READ
        return self.synchronization in alone and self.strategy.num_replicas_in_sync > 1

    def _change(self, given: Any) -> Tensor:
        """What this replica's copy changes by."""
        x = self.strategy._tensor("assign", given, self.value.dtype)
        if context.replica() is None:  # all replicas give the same
            return self._part(x)
        if self._own_copies or self.strategy.num_replicas_in_sync == 1:
            return x
        return aggregate(self.strategy, x, self.aggregation)

    def _part(self, whole: Tensor) -> Tensor:
        """This replica's part of the value of all replicas, as TensorFlow divides a sum.

        The parts differ by at most one in the last digit, so that they add up exactly.
        """
        if not (self._own_copies and self.aggregation is VariableAggregation.SUM):
            return whole
        if whole.is_complex():
            return torch.view_as_complex(self._part(torch.view_as_real(whole)))
        replicas, counts = self.strategy.num_replicas_in_sync, _counts(whole)
        digit = 1 if counts else whole - torch.nextafter(whole, torch.zeros_like(whole))
        units = whole // digit
        part = (units // replicas + (units % replicas > self.strategy._replica)) * digit
        return part if counts else torch.where(part.isfinite(), part, whole / replicas)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        key = f"{prefix}value"
        if local_metadata.get(_OF_ALL) and key in state_dict:
            state_dict = {**state_dict, key: self._part(state_dict[key])}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _counts(x: Tensor) -> bool:
    """True for whole numbers."""
    return not (x.is_floating_point() or x.is_complex())


@torch.no_grad()
def aggregated_buffers(strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
    """What each buffer of a model is for all replicas together, by its name.

    Buffers are ON_READ: batch normalization's statistics differ between replicas. Numbers are
    averaged, counters are the first replica's; a :class:`Variable` says what it wants.

    Args:
        strategy: compares the buffers first; those that are equal everywhere send nothing.
        model: the same on all replicas.
    """
    return {name: _one(strategy, tensor, how) for name, tensor, how in _buffers(model)}


def _one(strategy: Strategy, tensor: Tensor, how: VariableAggregation) -> Tensor:
    content = tensor.cpu().reshape(-1).contiguous().view(torch.uint8)  # numpy has no bfloat16
    shown = strategy._compare("buffers", [zlib.crc32(content.numpy().tobytes())])
    if how is not VariableAggregation.SUM and shown.count(shown[0]) == len(shown):
        return tensor.clone()
    return aggregate(strategy, tensor, how)


@torch.no_grad()
def synchronize_buffers(strategy: Strategy, model: nn.Module) -> None:
    """Give each replica the same buffers, for an evaluation that does not depend on the replica.

    Parts of a sum stay as they are, and what is not aggregated: each replica has its own.
    """
    for _, tensor, how in _buffers(model):
        if how not in (VariableAggregation.SUM, VariableAggregation.NONE):
            tensor.copy_(_one(strategy, tensor, how))


def state_dict(strategy: Strategy, model: nn.Module) -> dict[str, Any]:
    """A model's state on all replicas together: what to save.

    ``model.load_state_dict`` knows it, and gives each replica its part of a sum.
    """
    found, state = aggregated_buffers(strategy, model), cast(Any, model.state_dict())
    state.update((name, value) for name, value in found.items() if name in state)
    for facts in state._metadata.values():
        facts[_OF_ALL] = True
    return cast(dict[str, Any], state)


@torch.no_grad()
def divide_sums(model: nn.Module) -> None:
    """Give each replica its part of the sums that a checkpoint holds, which it has loaded."""
    for module in model.modules():
        if isinstance(module, Variable):
            module.assign(module.value)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, VariableAggregation]]:
    for path, module in model.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            yield ".".join(filter(None, (path, name))), tensor, _how(module, tensor)


def _how(module: nn.Module, tensor: Tensor) -> VariableAggregation:
    first, mean = VariableAggregation.ONLY_FIRST_REPLICA, VariableAggregation.MEAN
    if isinstance(module, Variable):
        return module.aggregation if module._own_copies else first
    return mean if tensor.is_floating_point() else first
