"""Variables of a strategy: which tensors it keeps the same, and how their values become one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from distkit.errors import StrategyError
from distkit_strategies import context

if TYPE_CHECKING:
    from distkit_strategies.strategy import Strategy


class ReduceOp(str, Enum):
    """How the values of the replicas become one."""

    SUM, MEAN = "sum", "mean"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        known = {str(value).lower().rpartition(".")[2]: op for op in cls for value in (op.value,)}
        if (found := known.get(str(value).lower().rpartition(".")[2])) is None:
            raise ValueError(f'no reduction {value!r}: there are "sum" and "mean".')
        return found


class Made(NamedTuple):
    """A tensor that a scope has seen being made."""

    name: str
    tensor: Tensor
    trains: bool  #: a parameter, not a buffer


#: Each variable's strategy and name, while both live: a strategy may hold its variables.
_owners: Any = WeakTensorKeyDictionary()
_unwatched: ContextVar[bool] = ContextVar("unwatched", default=False)


def owned(tensor: Tensor) -> tuple[Strategy, str] | None:
    """The strategy in whose scope a tensor was made, and its name; None for no strategy's."""
    strategy, name = _owners.get(tensor, (_nobody, ""))
    return None if (whose := strategy()) is None else (whose, name)


def _nobody() -> None:
    """The strategy of a tensor that was made outside of every scope."""


def adopt(tensor: Tensor, strategy: Strategy, name: str) -> None:
    """Make a tensor a variable of a strategy, in place of the one of this name."""
    _owners[tensor] = weakref.ref(strategy), name


@contextmanager
def watched(strategy: Strategy) -> Iterator[list[Made]]:
    """Collect the parameters and buffers that modules get while it is open.

    It uses torch's global registration hooks, so that any model is seen.
    """
    places: dict[tuple[int, str], nn.Module] = {}

    def note(owner: nn.Module, name: str, tensor: Any) -> None:
        places[id(owner), name] = owner

    hooks = [
        module.register_module_parameter_registration_hook(note),
        module.register_module_buffer_registration_hook(note),
    ]
    made: list[Made] = []
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()
    made.extend(_found(places))
    for m in made:
        check_initialized(m)
        adopt(m.tensor, strategy, m.name)


def _found(places: dict[tuple[int, str], nn.Module]) -> list[Made]:
    """What is there when the scope ends: ``.double()`` has put other buffers in place of some."""
    found: dict[int, Made] = {}
    for (_, name), owner in places.items():
        tensor = {**owner._parameters, **owner._buffers}.get(name)
        if tensor is not None and owned(tensor) is None:
            trains = isinstance(tensor, nn.Parameter)
            found[id(tensor)] = Made(f"{type(owner).__name__}.{name}", tensor, trains)
    return [*found.values()]


def check_initialized(made: Made) -> None:
    """Refuse a lazy parameter: there is no value yet that the replicas could share.

    Raises:
        StrategyError: it is one.
    """
    if is_lazy(made.tensor):
        raise StrategyError(
            f"{made.name} has no shape yet: it belongs to a lazy module. Call the model once with "
            "an example inside the scope, so that every replica gets the same first weights."
        )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer updates, in its order."""
    return [w for group in optimizer.param_groups for w in group["params"]]


@contextmanager
def unwatched() -> Iterator[None]:
    """While it is open, an optimizer may step as it likes: torch lets one, to make its state."""
    token = _unwatched.set(True)
    try:
        yield
    finally:
        _unwatched.reset(token)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Before any ``optimizer.step()`` of this process; returns its arguments if they change."""
    replica = context.replica()
    if _unwatched.get():
        return None
    if replica is None:
        _refuse_outside(optimizer)
        return None
    if (closure := (args[1:2] or (kwargs.get("closure"),))[0]) is None:
        replica.strategy._synchronize(optimizer, replica)
        return None
    replica.strategy._check_closure(optimizer)

    def synchronized() -> Any:
        loss = closure()
        replica.strategy._synchronize(optimizer, replica)
        return loss if loss is None else replica.mean_loss(loss)

    return (args[0], synchronized), {k: v for k, v in kwargs.items() if k != "closure"}


def _refuse_outside(optimizer: Optimizer) -> None:
    found = next(filter(None, map(owned, parameters_of(optimizer))), None)
    if found is not None and not found[0]._steps_alone:
        raise StrategyError(
            f"{type(optimizer).__name__}.step() outside `run`: it updates {found[1]}, a variable "
            f"of {found[0]}, with the gradients of this replica alone. Call it in the function "
            "that strategy.run gets."
        )


class Mean(float):
    """A number that remembers its rows."""


def remember_rows(result: Any, rows: int | None) -> Any:
    """Make a tensor or a number remember of how many rows it is the mean, for ``reduce``."""
    result = Mean(result) if type(result) is float else result
    if rows is not None and isinstance(result, Tensor | Mean):
        result._rows = rows  # type: ignore[union-attr]
    return result


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """After any ``optimizer.step()`` of this process."""
    if (replica := context.replica()) is not None and not _unwatched.get():
        replica.strategy._stepped()


def _before_parameter(owner: nn.Module, name: str, parameter: Any) -> None:
    """Before any module of this process gets a parameter."""
    replica = context.replica()
    new = parameter is not None and owned(parameter) is None
    if new and replica is not None and not replica.strategy._steps_alone:
        raise StrategyError(
            f"{type(owner).__name__}.{name} is made inside `run` of {replica.strategy}: each "
            "replica would begin with other values. Make the model before, in `with "
            "strategy.scope():`."
        )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
module.register_module_parameter_registration_hook(_before_parameter)
