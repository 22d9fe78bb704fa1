"""Variables of a strategy: what a scope makes, when optimizers may step, values that differ.

A scope watches torch's registration hooks, so that it sees the parameters and buffers of any model.
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
from distkit_strategies.replica import ReduceOp, get_strategy, running

if TYPE_CHECKING:
    from distkit_strategies.strategy import Strategy

#: Each variable's strategy and name, while both live: a strategy may hold its variables.
_owners: Any = WeakTensorKeyDictionary()
#: In the metadata of a state: its values are those of all replicas together.
_OF_ALL = "of_all_replicas"


@dataclass
class Made:
    """What a scope has seen being made.

    Args:
        tensors: parameters and buffers, with their names.
        roots: models that live on: modules with parameters that are not part of others.
    """

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    roots: WeakValueDictionary[int, nn.Module] = field(default_factory=WeakValueDictionary)


def owned(tensor: Tensor) -> tuple[Strategy, str] | None:
    """The strategy in whose scope a tensor was made, and its name; None outside of every scope."""
    owner, name = _owners.get(tensor, (lambda: None, ""))
    strategy = owner()
    return None if strategy is None else (strategy, name)


def adopt(tensor: Tensor, strategy: Strategy, name: str) -> None:
    """Make a tensor a variable of a strategy."""
    _owners[tensor] = ref(strategy), name


@contextmanager
def watched(strategy: Strategy) -> Iterator[Made]:
    """Collect what modules get while it is open.

    Raises:
        StrategyError: a lazy parameter, which has no value yet that replicas could share.
    """
    places: dict[tuple[int, str], nn.Module] = {}

    def note(owner: nn.Module, name: str, thing: Any) -> None:
        places[id(owner), name] = owner

    handles = [
        hooks.register_module_parameter_registration_hook(note),
        hooks.register_module_buffer_registration_hook(note),
        hooks.register_module_module_registration_hook(note),
    ]
    made, inner = Made(), set[int]()
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()
    for (_, name), owner in places.items():  # now: ``.double()`` replaces buffers
        thing = {**owner._parameters, **owner._buffers, **owner._modules}.get(name)
        full = f"{type(owner).__name__}.{name}"
        if isinstance(thing, nn.Module):
            inner.add(id(thing))
        elif thing is not None and owned(thing) is None:
            if is_lazy(thing):
                raise StrategyError(
                    f"{full} has no shape yet: it belongs to a lazy module. Call the model once "
                    "with an example inside the scope, so that every replica gets the same first "
                    "weights."
                )
            adopt(thing, strategy, full)
            made.tensors.append((full, thing))
    owners = {id(owner): owner for owner in places.values() if id(owner) not in inner}
    made.roots.update({n: m for n, m in owners.items() if next(m.parameters(), None) is not None})


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer updates, in its order."""
    return [w for group in optimizer.param_groups for w in group["params"]]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any ``optimizer.step()`` of this process.

    Raises:
        StrategyError: on several replicas: it is called with a closure.
    """
    replica, closure = running(), (args[1:2] or (kwargs.get("closure"),))[0]
    if replica is None:
        _check_outside(optimizer)
    elif closure is None or replica.strategy._alone:
        replica.strategy._synchronize(optimizer, replica)
    else:
        raise StrategyError(
            f"{type(optimizer).__name__}.step(closure) under {replica.strategy}: the gradients "
            "that the closure computes would be those of this replica alone. Compute them before, "
            "and call step() without a closure."
        )


def _check_outside(optimizer: Optimizer) -> None:
    """Refuse a step of one replica alone; torch makes one with rate 0, to initialize the state."""
    found = next(filter(None, map(owned, parameters_of(optimizer))), None)
    moves = any(group.get("lr", 1) for group in optimizer.param_groups)
    if found is not None and moves and not found[0]._steps_alone:
        raise StrategyError(
            f"{type(optimizer).__name__}.step() outside `run`: it updates {found[1]}, a variable "
            f"of {found[0]}, with the gradients of this replica alone. Call it in the function "
            "that strategy.run gets."
        )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """After any ``optimizer.step()`` of this process."""
    if (replica := running()) is not None:
        replica.strategy._stepped()


def _before_parameter(owner: nn.Module, name: str, parameter: Any) -> None:
    """Before any module of this process gets a parameter."""
    replica, new = running(), parameter is not None and owned(parameter) is None
    if new and replica is not None and not replica.strategy._steps_alone:
        raise StrategyError(
            f"{type(owner).__name__}.{name} is made inside `run` of {replica.strategy}: each "
            "replica would begin with other values. Make the model before, in `with "
            "strategy.scope():`."
        )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
hooks.register_module_parameter_registration_hook(_before_parameter)


class Mean(float):
    """A number that remembers its rows."""


def remember_rows(result: Any, rows: int | None) -> Any:
    """Make a result of ``run`` remember of how many rows it is the mean, without its gradient."""
    result = Mean(result) if type(result) is float else result
    result = result.detach() if isinstance(result, Tensor) else result
    if rows is not None and isinstance(result, Tensor | Mean):
        result._rows = rows  # type: ignore[union-attr]
    return result


# -- values of which replicas hold different copies ------------------------------------------------


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
        self.strategy = get_strategy()
        self.synchronization = VariableSynchronization(synchronization)
        self.aggregation = VariableAggregation(aggregation)
        first = self.strategy._tensor("Variable", value).detach().clone()
        if self.aggregation is VariableAggregation.MEAN and _counts(first):
            raise StrategyError(
                f"A variable of {first.dtype} with aggregation MEAN: a mean of whole numbers need "
                "not be one. Make it of floating-point numbers, or use SUM or ONLY_FIRST_REPLICA."
            )
        self.register_buffer("value", first)
        if running() is not None:  # elsewhere its scope does so when it ends
            adopt(first, self.strategy, "Variable.value")
            self.strategy._created(Made([("Variable.value", first)]))

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
        if self._own_copies and running() is None:
            return _aggregate(self.strategy, self.value, self.aggregation)
        return self.value.clone()

    @property
    def _own_copies(self) -> bool:
        alone = VariableSynchronization.NONE, VariableSynchronization.ON_READ
        return self.synchronization in alone and not self.strategy._alone

    def _change(self, given: Any) -> Tensor:
        """What this replica's copy changes by."""
        x = self.strategy._tensor("assign", given, self.value.dtype)
        if running() is None:  # all replicas give the same
            return self._part(x)
        if self._own_copies or self.strategy._alone:
            return x
        return _aggregate(self.strategy, x, self.aggregation)

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


def _aggregate(strategy: Strategy, x: Tensor, how: VariableAggregation) -> Tensor:
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
    op = ReduceOp.MEAN if how is VariableAggregation.MEAN else ReduceOp.SUM
    return strategy._reduce("all_reduce", op, x.detach()).to(x.dtype)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, VariableAggregation]]:
    """Each buffer, its name, and how copies become one.

    Batch normalization's statistics differ between replicas. Numbers are averaged, counters are the
    first replica's; a :class:`Variable` says what it wants.
    """
    first, mean = VariableAggregation.ONLY_FIRST_REPLICA, VariableAggregation.MEAN
    for path, owner in model.named_modules():
        for name, tensor in owner.named_buffers(recurse=False):
            how = mean if tensor.is_floating_point() else first
            if isinstance(owner, Variable):
                how = owner.aggregation if owner._own_copies else first
            yield ".".join(filter(None, (path, name))), tensor, how


def _one(strategy: Strategy, tensor: Tensor, how: VariableAggregation) -> Tensor:
    """The value of all replicas; of copies that are equal nothing more is sent."""
    content = tensor.cpu().reshape(-1).contiguous().view(torch.uint8)  # numpy has no bfloat16
    shown = strategy._compare("buffers", [zlib.crc32(content.numpy().tobytes())])
    if how is not VariableAggregation.SUM and shown.count(shown[0]) == len(shown):
        return tensor.clone()
    return _aggregate(strategy, tensor, how)


@torch.no_grad()
def synchronize_buffers(strategy: Strategy, model: nn.Module) -> None:
    """Give each replica the same buffers, for an evaluation that does not depend on the replica.

    Parts of a sum stay as they are, and what is not aggregated: each replica has its own.
    """
    for _, tensor, how in _buffers(model):
        if how not in (VariableAggregation.SUM, VariableAggregation.NONE):
            tensor.copy_(_one(strategy, tensor, how))


@torch.no_grad()
def state_dict(strategy: Strategy, model: nn.Module) -> dict[str, Any]:
    """A model's state on all replicas together: what to save.

    ``model.load_state_dict`` knows it, and gives each replica its part of a sum.
    """
    state = model.state_dict()
    saved = ((name, tensor, how) for name, tensor, how in _buffers(model) if name in state)
    return of_all_replicas(model, {**state, **{n: _one(strategy, t, how) for n, t, how in saved}})


def of_all_replicas(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """A state of a model, marked as that of all replicas together."""
    state = cast(Any, OrderedDict(values))
    about = cast(Any, model.state_dict())._metadata
    state._metadata = {path: {**facts, _OF_ALL: True} for path, facts in about.items()}
    return cast(dict[str, Any], state)
