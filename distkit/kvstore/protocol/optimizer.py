"""Optimizers that compute the next value of a key from gradients, on a server or a worker.

Peers send a server only a specification, that is, a name and plain-data options, never code.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor

from distkit.errors import KVStoreError

#: MXNet's names for torch options.
_ALIASES = {"learning_rate": "lr", "wd": "weight_decay"}
#: Options that all optimizers accept, besides those of their class.
_COMMON = ("rescale_grad", "multi_precision")
#: Constructor arguments that users cannot set: ``params``, and those that select an implementation.
_EXCLUDED_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable")
#: The base class, and optimizers that cannot update a part of an array from its dense gradient.
_UNSUPPORTED = ("Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon")


class _SGD(torch.optim.Optimizer):
    """MXNet's SGD for one weight. It skips torch's constructor, whose imports take seconds."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.param_groups = [{"params": params, **self.defaults}]
        self._momentum: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        """Write the updated weight to a new tensor."""
        (group,) = self.param_groups
        (weight,) = group["params"]
        w, g, scale = weight.data, weight.grad, -group["lr"]
        if group["weight_decay"]:
            g = g.add(w, alpha=group["weight_decay"])
        if group["momentum"]:
            if self._momentum is None:
                self._momentum = torch.zeros_like(w)
            g, scale = self._momentum.mul_(group["momentum"]).add_(g, alpha=scale), 1
        weight.data = torch.add(w, g, alpha=scale)


_TORCH: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in _UNSUPPORTED
}
#: Optimizer classes by lowercase name. "sgd" is MXNet's SGD; "torch.optim.sgd" is torch's.
_KINDS = {name.lower(): kind for name, kind in _TORCH.items()}
_KINDS |= {f"torch.optim.{name}": kind for name, kind in _KINDS.items()} | {"sgd": _SGD}


def _unsupported(optimizer: str) -> KVStoreError:
    return KVStoreError(
        f"servers do not support the optimizer {optimizer}. Use kvstore.SGD(learning_rate=0.1), or "
        "a class of torch.optim with its options, such as (torch.optim.Adam, lr=0.001). "
        f"Supported classes: {', '.join(sorted(_TORCH))}."
    )


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by name and options.

    Args:
        name: ``"sgd"`` for MXNet's SGD; ``"adam"`` or ``"torch.optim.Adam"`` for a class of
            ``torch.optim``.
        options: the options of the class (``learning_rate`` and ``wd`` are aliases for ``lr`` and
            ``weight_decay``), ``rescale_grad`` and ``multi_precision``. ``rescale_grad`` multiplies
            every gradient: under dist_sync a server *sums* the workers' gradients, so 1 / number
            of workers yields the mean. ``multi_precision`` updates 16-bit weights in a float32
            copy.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    @property
    def kind(self) -> Any:
        """The optimizer's class.

        Raises:
            KVStoreError: The name is unknown.
        """
        if self.name.lower() not in _KINDS:
            raise _unsupported(repr(self.name))
        return _KINDS[self.name.lower()]

    @property
    def group(self) -> dict[str, Any]:
        """All options of the class, including defaults."""
        explicit = {_ALIASES.get(k, k): v for k, v in self.options.items() if k not in _COMMON}
        return {**_defaults(self.kind), **explicit}

    def divided(self, batch_size: float) -> OptimizerSpec:
        """Return the same optimizer, but with gradients divided by ``batch_size``."""
        scale = self.options.get("rescale_grad", 1) / batch_size
        return OptimizerSpec(self.name, {**self.options, "rescale_grad": scale})

    def check(self) -> OptimizerSpec:
        """Check the specification with a trial step on one number, and return it.

        Raises:
            KVStoreError: The name is unknown, or the step fails.
        """
        one = torch.ones(1)
        try:
            Updater(self, one).update(one, one)
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as e:
            supported = ", ".join([*_defaults(self.kind), *_COMMON])
            raise KVStoreError(f"optimizer {self}: {e}. Its options are {supported}.") from None
        return self


def SGD(
    learning_rate: float = 0.01, momentum: float = 0.0, wd: float = 0.0, **options: Any
) -> OptimizerSpec:
    """Return the specification of MXNet's SGD with momentum and weight decay.

    ::

        g ← rescale_grad · gradient + wd · w
        m ← momentum · m − learning_rate · g
        w ← w + m

    Args:
        learning_rate: step size.
        momentum: fraction of the previous step that is kept, 0 to 1.
        wd: weight decay (L2 penalty).
        options: ``rescale_grad``, ``multi_precision``: see :class:`OptimizerSpec`.

    Raises:
        KVStoreError: An option is unknown or invalid.
    """
    return spec_of("sgd", {"lr": learning_rate, "momentum": momentum, "wd": wd, **options})


class Updater:
    """The optimizer for one key, with its state.

    Args:
        spec: the specification.
        value: the key's value.

    >>> one = torch.ones(1)
    >>> Updater(SGD(learning_rate=0.5), one).update(one, 2 * one)
    tensor([0.])
    """

    def __init__(self, spec: OptimizerSpec, value: Tensor) -> None:
        is_mixed = spec.options.get("multi_precision") and value.dtype in LOW_PRECISION
        self._master = value.float() if is_mixed else None  # the float32 copy of a 16-bit value
        self._weight = torch.empty_like(value if self._master is None else self._master)
        self._optimizer: torch.optim.Optimizer = spec.kind([self._weight], **spec.group)
        self._in_place, self.spec = spec.kind is not _SGD, spec

    def reconfigure(self, spec: OptimizerSpec, value: Tensor) -> Updater:
        """Return this updater with changed options, or a new one if they need different state."""
        previous, option = self.spec, "multi_precision"
        if spec.kind is not previous.kind or spec.options.get(option) != previous.options.get(
            option
        ):
            return Updater(spec, value)
        self._optimizer.param_groups[0].update(spec.group)
        self.spec = spec
        return self

    def update(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the next value in new memory, so that responses in flight keep the previous one.

        Args:
            value: the previous value.
            gradient: a gradient with the same shape.
        """
        w = value if self._master is None else self._master
        g = gradient if gradient.dtype is w.dtype else gradient.to(w.dtype)
        if (scale := self.spec.options.get("rescale_grad", 1)) != 1:
            g = torch.mul(g, scale)
        weight = self._weight
        weight.data, weight.grad = w.clone() if self._in_place else w, g
        self._optimizer.step()
        weight.grad = None
        if self._master is not None:
            self._master = weight.data
        return weight.data.to(value.dtype)


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters.items()
    return {name: p.default for name, p in parameters if name not in _EXCLUDED_OPTIONS}


# -- sums of gradients ---------------------------------------------------------------

#: Dtypes whose sums are computed in float32 and rounded once.
LOW_PRECISION = torch.float16, torch.bfloat16


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one dtype, in float32 if the dtype is float16 or bfloat16.

    A single tensor is returned unchanged.

    >>> sum_tensors([torch.ones(2), torch.ones(2)])
    tensor([2., 2.])
    """
    first, *others = tensors
    if not others:
        return first
    if first.dtype in LOW_PRECISION:
        first, *others = (t.float() for t in tensors)
    total: Tensor = torch.add(first, others[0])
    for t in others[1:]:
        total += t
    return total


# -- optimizers passed by users -----------------------------------------------------


def spec_of(optimizer: Any, options: Mapping[str, Any] | None = None) -> OptimizerSpec:
    """Return the specification for a name, or for a ``torch.optim`` class or instance.

    ``options`` override the corresponding options of an instance or a specification. The result is
    checked with a trial step, unless ``optimizer`` is an instance or a specification and there are
    no ``options``.

    Raises:
        KVStoreError: Servers do not support the optimizer, an option is unknown or invalid, or an
            instance has several parameter groups or has already taken steps.
    """
    options = dict(options or {})
    if isinstance(optimizer, torch.optim.Optimizer):
        (optimizer, _), *others = groups_of(optimizer)
        if others:
            raise KVStoreError(
                f"the optimizer has {1 + len(others)} parameter groups, but the keys of each group "
                "are unknown. Call kv.set_optimizer(..., keys=[...]) for each group."
            )
    if isinstance(optimizer, OptimizerSpec):
        if not options:
            return optimizer  # servers check it; a strategy would intercept a trial step
        optimizer, options = optimizer.name, {**optimizer.options, **options}
    if isinstance(optimizer, type) and optimizer in _TORCH.values():
        optimizer = f"torch.optim.{optimizer.__name__}"
    if not isinstance(optimizer, str):
        raise _unsupported(f"{optimizer!r:.60}")
    return _as_data(optimizer, options).check()


def groups_of(optimizer: torch.optim.Optimizer) -> list[tuple[OptimizerSpec, list[Tensor]]]:
    """Return the specification and parameters of each of a new optimizer's groups.

    Raises:
        KVStoreError: Servers do not support the optimizer, or it has already taken steps.
    """
    name = type(optimizer).__name__
    if _TORCH.get(name) is not type(optimizer):
        raise _unsupported(f"{type(optimizer)!r:.60}")
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise KVStoreError(
            f"torch.optim.{name} has already taken steps, and its state would be lost. Pass a new "
            "optimizer."
        )
    options = _defaults(_TORCH[name])
    return [
        (_as_data(f"torch.optim.{name}", {n: g[n] for n in options}), g["params"])
        for g in optimizer.param_groups
    ]


def _as_data(name: str, options: Mapping[str, Any]) -> OptimizerSpec:
    """Return a specification with plain-data options, without options that equal their defaults."""
    default = {"rescale_grad": 1, "multi_precision": False}
    default |= _defaults(OptimizerSpec(name).kind)
    try:
        plain = to_builtins({_ALIASES.get(k, k): v for k, v in options.items()})
    except (TypeError, ValueError, RuntimeError) as e:
        raise KVStoreError(
            f"optimizer {name!r} has an unsupported option ({e}). Use only numbers, strings, "
            "booleans and tuples of these."
        ) from None
    changed = {k: v for k, v in plain.items() if k not in default or v != default[k]}
    return OptimizerSpec(name, changed)
