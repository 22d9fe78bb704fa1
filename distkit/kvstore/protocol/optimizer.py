"""Optimizers: how a server, or a worker, turns gradients into the next value of a key.

A specification is a name and options of plain data. That is how it travels, and all that a server
takes from a peer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler as schedulers

from distkit.errors import KVStoreError
from distkit.kvstore.client.tensors import named
from distkit.kvstore.protocol.placement import NARROW
from distkit.kvstore.transport.memory import empty_like

#: MXNet's names of torch's options.
_ALIASES = {"learning_rate": "lr", "wd": "weight_decay"}
#: Options that every optimizer may have, beside those of its optimizer.
_COMMON = ("rescale_grad", "multi_precision", "lr_scheduler")
#: Options of torch's that say how to compute, not what.
_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
#: Optimizers of torch's that need more than the gradient of a part of an array.
_NOT = ("Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon")


class _SGD:
    """MXNet's; without torch.optim, whose first optimizer takes seconds of imports."""

    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.group = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self._momentum: Tensor | None = None

    def after(self, w: Tensor, g: Tensor) -> Tensor:
        """The next weight, a new tensor."""
        group = self.group
        if group["weight_decay"]:
            g = g.add(w, alpha=group["weight_decay"])
        if not group["momentum"]:
            return torch.add(w, g, alpha=-group["lr"], out=empty_like(w))
        if self._momentum is None:
            self._momentum = torch.zeros_like(w)
        m = self._momentum.mul_(group["momentum"]).sub_(g, alpha=group["lr"])
        return torch.add(w, m, out=empty_like(w))


class _Torch:
    """An optimizer of torch.optim, of one weight."""

    def __init__(self, kind: Any, like: Tensor, options: Mapping[str, Any]) -> None:
        self._weight = torch.empty_like(like)
        self.optimizer: torch.optim.Optimizer = kind([self._weight], **options)
        self.group = self.optimizer.param_groups[0]

    def after(self, w: Tensor, g: Tensor) -> Tensor:
        """The next weight, a new tensor."""
        mine = self._weight
        mine.data, mine.grad = empty_like(w).copy_(w), g
        self.optimizer.step()
        mine.grad = None
        return mine.data


_TORCH: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in _NOT
}
_KINDS = {
    **{name.lower(): kind for name, kind in _TORCH.items()},
    **{f"torch.optim.{name}": kind for name, kind in _TORCH.items()},
    "sgd": _SGD,
}
_THERE_ARE = (
    "Give kvstore.SGD(learning_rate=0.1), or a class of torch.optim and its options, such as "
    f"(torch.optim.Adam, lr=0.001). Servers know: {', '.join(sorted(_TORCH))}."
)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by name and options.

    Args:
        name: ``"sgd"`` for MXNet's; ``"adam"`` or ``"torch.optim.Adam"`` for a class of
            ``torch.optim``.
        options: those of the optimizer (``learning_rate`` and ``wd`` are ``lr`` and
            ``weight_decay``), and three more: ``rescale_grad``, a factor on every gradient (under
            dist_sync a server *sums* the workers' gradients: 1 / number of workers makes it their
            mean); ``multi_precision``, to update 16-bit weights in a float32 copy; and
            ``lr_scheduler``, a class of ``torch.optim.lr_scheduler`` by name, with its options,
            such as ``("StepLR", {"step_size": 10})``. It steps after each update of a key.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    @property
    def kind(self) -> Any:
        """The class.

        Raises:
            KVStoreError: there is none.
        """
        kind = _KINDS.get(self.name) or _KINDS.get(self.name.lower())
        if kind is None:
            raise KVStoreError(f"there is no optimizer {self.name!r}. {_THERE_ARE}")
        return kind

    @property
    def group(self) -> dict[str, Any]:
        """The options of the class: those that were given, and the defaults of the others."""
        given = {_ALIASES.get(k, k): v for k, v in self.options.items() if k not in _COMMON}
        return {**_defaults(self.kind), **given}

    @property
    def learning_rate(self) -> float:
        """The step size."""
        return float(self.group["lr"])

    def scaled(self, scale: float) -> OptimizerSpec:
        """The same with this factor on gradients."""
        others = {k: v for k, v in self.options.items() if k != "rescale_grad"}
        return OptimizerSpec(self.name, others if scale == 1 else {**others, "rescale_grad": scale})

    def check(self) -> OptimizerSpec:
        """The same; it works, since it has made a step on one number.

        Raises:
            KVStoreError: it does not.
        """
        one = torch.ones(1)
        try:
            Updater(self, one).update(one, one)
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as e:
            takes = ", ".join([*_defaults(self.kind), *_COMMON])
            raise KVStoreError(f"optimizer {self}: {e}. It takes {takes}.") from None
        return self


def SGD(
    learning_rate: float = 0.01, momentum: float = 0.0, wd: float = 0.0, **options: Any
) -> OptimizerSpec:
    """MXNet's stochastic gradient descent with momentum and weight decay.

    ::

        g ← rescale_grad · gradient + wd · w
        m ← momentum · m − learning_rate · g
        w ← w + m

    Args:
        learning_rate: step size η.
        momentum: how much of the last step is kept, 0 to 1.
        wd: weight decay, the L2 penalty's factor.
        options: ``rescale_grad``, ``multi_precision``, ``lr_scheduler``: see
            :class:`OptimizerSpec`.

    Raises:
        KVStoreError: it has no such option.
    """
    return specify("sgd", {"lr": learning_rate, "momentum": momentum, "wd": wd, **options})


class Updater:
    """The optimizer of one key, with what it keeps from update to update.

    Args:
        spec: which one.
        value: the key's value.

    >>> one = torch.ones(1)
    >>> Updater(SGD(learning_rate=0.5), one).update(one, 2 * one)
    tensor([0.])
    """

    def __init__(self, spec: OptimizerSpec, value: Tensor) -> None:
        wide = spec.options.get("multi_precision") and value.dtype in NARROW
        self._master = value.float() if wide else None  # what is updated, of a narrow value
        like, kind, self.spec = value if self._master is None else self._master, spec.kind, spec
        if kind is _SGD:
            self._rule: _SGD | _Torch = _SGD([], **spec.group)
        else:
            self._rule = _Torch(kind, like, spec.group)
        self._scheduler = _scheduler(self._rule, spec.options.get("lr_scheduler"))
        self._schedule()

    def _schedule(self) -> None:
        """Take over the scheduler's rate."""
        if self._scheduler is not None:
            self._rule.group["lr"] = self._scheduler.optimizer.param_groups[0]["lr"]

    def follow(self, spec: OptimizerSpec, value: Tensor) -> Updater:
        """This one with changed options, or another if that is not possible."""
        if spec == self.spec:
            return self
        before, options = self.spec.options, spec.options
        same = [before.get(n) == options.get(n) for n in ("multi_precision", "lr_scheduler")]
        if spec.kind is not self.spec.kind or self._scheduler is not None or not all(same):
            return Updater(spec, value)
        self._rule.group.update(spec.group)
        self.spec = spec
        return self

    def update(self, value: Tensor, gradient: Tensor) -> Tensor:
        """The next value, in memory of its own: an answer under way keeps the last one.

        Args:
            value: the last one.
            gradient: of its shape.
        """
        w = value if self._master is None else self._master
        g = gradient if gradient.dtype is w.dtype else gradient.to(w.dtype)
        if (scale := self.spec.options.get("rescale_grad", 1)) != 1:
            g = torch.mul(g, scale, out=empty_like(g))
        new = self._rule.after(w, g)
        if self._scheduler is not None:
            if isinstance(self._rule, _SGD):
                self._scheduler.optimizer.step()  # of nothing: schedulers count these
            self._scheduler.step()
            self._schedule()
        if self._master is None:
            return new
        self._master = new
        return new.to(value.dtype)


def _scheduler(rule: _SGD | _Torch, given: Any) -> schedulers.LRScheduler | None:
    if given is None:
        return None
    name, options = given
    kind: Any = getattr(schedulers, str(name), None)
    if not inspect.isclass(kind) or not issubclass(kind, schedulers.LRScheduler):
        raise KVStoreError(f"there is no torch.optim.lr_scheduler.{name}.")
    one = torch.zeros(1)
    made: schedulers.LRScheduler = kind(
        rule.optimizer if isinstance(rule, _Torch) else torch.optim.SGD([one], rule.group["lr"]),
        **options,
    )
    return made


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    takes = inspect.signature(kind).parameters.items()
    return {name: p.default for name, p in takes if name not in _HOW}


# -- what may be given --------------------------------------------------------------


def spec_of(given: Any, options: Mapping[str, Any] | None = None) -> OptimizerSpec:
    """The specification that a name, or a class or instance of ``torch.optim`` stands for.

    Raises:
        KVStoreError: servers do not know it, or not with these options.
    """
    options = dict(options or {})
    if isinstance(given, str):
        return specify(given, options)
    if isinstance(given, type) and given in _TORCH.values():
        return specify(f"torch.optim.{given.__name__}", options)
    if isinstance(given, OptimizerSpec):
        if options:
            raise KVStoreError("options beside an optimizer that has them. Give one.")
        return given
    if not isinstance(given, torch.optim.Optimizer):
        raise _unknown(given)
    groups = groups_of(given)
    if len(groups) > 1:
        raise KVStoreError(
            f"{named(type(given))} with {len(groups)} groups of parameters: which keys they are is "
            "not known. Give it to kvstore.Trainer, or call kv.set_optimizer(..., keys=[...]) "
            "for each group."
        )
    spec = groups[0][0]
    return specify(spec.name, {**spec.options, **options})


def groups_of(optimizer: torch.optim.Optimizer) -> list[tuple[OptimizerSpec, list[Tensor]]]:
    """The groups of parameters of a new optimizer, each specified.

    Raises:
        KVStoreError: servers do not know it, or it has made steps.
    """
    name = type(optimizer).__name__
    if _TORCH.get(name) is not type(optimizer):
        raise _unknown(optimizer)
    if optimizer.state:
        raise KVStoreError(
            f"torch.optim.{name} has already made steps, and its state would be lost. Give a new "
            "one."
        )
    takes = _defaults(_TORCH[name])
    return [
        (_plain_spec(f"torch.optim.{name}", {n: g[n] for n in takes}), g["params"])
        for g in optimizer.param_groups
    ]


def specify(name: str, options: Mapping[str, Any]) -> OptimizerSpec:
    """A specification that can be sent, and works.

    Raises:
        KVStoreError: it does not.
    """
    return _plain_spec(name, options).check()


def _plain_spec(name: str, options: Mapping[str, Any]) -> OptimizerSpec:
    """The options that are not the defaults, as data."""
    default = {"rescale_grad": 1, "multi_precision": False, "lr_scheduler": None}
    default |= {k: _plain(name, k, v) for k, v in _defaults(OptimizerSpec(name).kind).items()}
    plain = {_ALIASES.get(k, k): _plain(name, k, v) for k, v in options.items()}
    given = {k: v for k, v in plain.items() if k not in default or v != default[k]}
    return OptimizerSpec(name, given)


def _plain(name: str, option: str, value: Any) -> Any:
    """A value as data: a tensor of one number as that, a scheduler's class as its name."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(name, option, v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(name, option, v) for k, v in value.items()}
    if isinstance(value, type) and issubclass(value, schedulers.LRScheduler):
        return value.__name__
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise KVStoreError(
        f"optimizer {name!r} with {option}={value!r:.60}: only numbers and names can be sent to "
        'servers. A scheduler is given as lr_scheduler=("StepLR", {"step_size": 10}).'
    )


def _unknown(given: Any) -> KVStoreError:
    what = f"the class {named(given)}" if isinstance(given, type) else named(type(given))
    return KVStoreError(f"set_optimizer got {what}, which cannot be sent to servers. {_THERE_ARE}")
