"""The rules by which a server turns a gradient into the next version of a weight.

Those with MXNet's names (``sgd``, ``adam``, …) compute what MXNet 1.9 computes; beside them every
optimizer of ``torch.optim`` that needs gradients alone. A rule is a name and numbers: that is how
it travels, and all that a server ever takes from a peer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.client.tensors import named
from distkit.kvstore.protocol import lr_scheduler as schedulers
from distkit.kvstore.protocol.lr_scheduler import LRScheduler
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.placement import NARROW
from distkit.kvstore.transport.memory import empty_like

#: What an optimizer keeps of a key, by name: tensors of the weight's shape, and single numbers.
State: TypeAlias = "dict[str, Tensor]"


class Turn(NamedTuple):
    """The number of an update: ``nth`` of this key; ``updates`` of the most updated key."""

    key: Key = 0
    nth: int = 1
    updates: int = 1


FIRST = Turn()


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The base class of optimizers.

    Args:
        learning_rate: step size η.
        wd: weight decay, the L2 penalty's factor.
        rescale_grad: factor on every pushed gradient. Under ``dist_sync`` the server *sums* the
            workers' gradients: 1 / number of workers makes it their mean.
        clip_gradient: bound on the absolute value of each rescaled element; None for none.
        multi_precision: update weights of 16 bits in a float32 copy, and round that.
        lr_scheduler: one of :mod:`distkit.kvstore.protocol.lr_scheduler`; its ``base_lr`` counts,
            unless another ``learning_rate`` than the default is given.
        lr_mult: factors on the learning rate, by key.
        wd_mult: factors on the weight decay, by key.

    Raises:
        KVStoreError: an option that it does not have.
    """

    learning_rate: float = 0.01
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    multi_precision: bool = False
    lr_scheduler: LRScheduler | None = None
    lr_mult: Mapping[Key, float] = field(default_factory=dict)
    wd_mult: Mapping[Key, float] = field(default_factory=dict)

    #: Where weight decay joins the gradient: "after" clipping, "before" it, or "never".
    decay: ClassVar[str] = "after"

    def __new__(cls, *args: Any, **options: Any) -> Optimizer:
        """Refuse options that it does not have."""
        takes = [f.name for f in fields(cls)]
        if odd := [option for option in options if option not in takes]:
            raise KVStoreError(
                f"optimizer {cls.__name__} with {', '.join(map(repr, odd))}. "
                f"It takes {', '.join(takes)}."
            )
        if len(args) > len(takes):
            raise KVStoreError(
                f"optimizer {cls.__name__} with {len(args)} options. It takes {', '.join(takes)}."
            )
        return super().__new__(cls)

    @property
    def whole(self) -> bool:
        """True if it needs arrays in their shape, not split over servers."""
        return False

    def refuses(self, shape: tuple[int, ...]) -> str:
        """The reason why it cannot update arrays of this shape; empty if it can."""
        return ""

    def goes_on(self, before: Optimizer) -> bool:
        """True if it can go on with what another optimizer has kept."""
        return type(self) is type(before)

    def rate(self, turn: Turn) -> float:
        """The learning rate of this update."""
        base, scheduler = self.learning_rate, self.lr_scheduler
        if scheduler is not None:
            base = scheduler(turn.updates, None if base == self.default_rate else base)
        return base * self.lr_mult.get(turn.key, 1.0) if self.lr_mult else base

    @property
    def default_rate(self) -> float:
        """The learning rate if none is given: then that of a scheduler counts."""
        return float(vars(type(self)).get("learning_rate", Optimizer.learning_rate))

    def apply(
        self, value: Tensor, gradient: Tensor, state: State, turn: Turn = FIRST
    ) -> tuple[Tensor, State]:
        """The next value of a key, and what is kept for the one after.

        Args:
            value: not changed.
            gradient: of its shape.
            state: what the last call returned; handed over, it may be changed.
            turn: which update it is.
        """
        if not (self.multi_precision and value.dtype in NARROW):
            fits = gradient.dtype is value.dtype
            return self.step(value, gradient if fits else gradient.to(value.dtype), state, turn)
        master = state.pop("master", None)
        master = value.float() if master is None else master
        master, kept = self.step(master, gradient.float(), state, turn)
        return master.to(value.dtype), {**kept, "master": master}

    def step(
        self, weight: Tensor, gradient: Tensor, state: State, turn: Turn
    ) -> tuple[Tensor, State]:
        """The next weight, from a gradient of its dtype."""
        wd = self.wd * self.wd_mult.get(turn.key, 1.0) if self.wd_mult else self.wd
        return self.update(
            weight,
            self._prepared(weight, gradient, wd),
            state,
            Hyper(self.rate(turn), wd, turn.nth),
        )

    def _prepared(self, weight: Tensor, g: Tensor, wd: float) -> Tensor:
        """The gradient, rescaled, clipped, and with weight decay where that is part of it."""
        if self.rescale_grad != 1:
            g = torch.mul(g, self.rescale_grad, out=empty_like(g))
        if wd and self.decay == "before":
            g = g.add(weight, alpha=wd)
        if self.clip_gradient is not None:
            g = g.clamp(-self.clip_gradient, self.clip_gradient)
        if wd and self.decay == "after":
            g = g.add(weight, alpha=wd)
        return g

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """The next weight and state, from a prepared gradient; nothing given is changed."""
        raise NotImplementedError

    def kept(self, like: Tensor) -> State:
        """The state that it would keep for such a key: names, shapes and dtypes."""
        zeros = torch.zeros_like(like)
        return replace(self, lr_scheduler=None).apply(zeros, zeros, {})[1]


class Hyper(NamedTuple):
    """The numbers of one update: learning rate, weight decay, and the how manieth of its key."""

    lr: float
    wd: float
    t: int


# -- MXNet's ----------------------------------------------------------------------


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum and weight decay.

    ::

        g ← clip(rescale_grad · gradient) + wd · w
        m ← momentum · m − learning_rate · g
        w ← w + m

    Args:
        learning_rate: step size η.
        momentum: how much of the last step is kept, 0 to 1.

    Further options are those of :class:`Optimizer`.

    >>> SGD(learning_rate=0.5).apply(torch.tensor([1.0]), torch.tensor([2.0]), {})
    (tensor([0.]), {})
    """

    learning_rate: float = 0.01
    momentum: float = 0.0

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Same as above."""
        if not self.momentum:
            return torch.add(w, g, alpha=-by.lr, out=empty_like(w)), {}
        m = _kept(state, "momentum", w, self.momentum).sub_(g, alpha=by.lr)
        return torch.add(w, m, out=empty_like(w)), {"momentum": m}


@dataclass(frozen=True)
class NAG(Optimizer):
    """Nesterov's accelerated gradient: as :class:`SGD`, and ``w ← w + momentum · m − η · g``."""

    learning_rate: float = 0.01
    momentum: float = 0.0

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Same as above."""
        m = _kept(state, "momentum", w, self.momentum).sub_(g, alpha=by.lr)
        return w + self.momentum * m - by.lr * g, {"momentum": m}


@dataclass(frozen=True)
class Signum(Optimizer):
    """Steps of one size, by the sign of the momentum (Bernstein et al., signSGD, 2018).

    Args:
        learning_rate: step size η.
        momentum: of the moving average of gradients; 0 for the sign of the gradient itself.
        wd_lh: decoupled weight decay.
    """

    learning_rate: float = 0.01
    momentum: float = 0.9
    wd_lh: float = 0.0
    decay = "never"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Same as above; without momentum weight decay is decoupled, too."""
        if not self.momentum:
            return (1 - by.lr * (by.wd + self.wd_lh)) * w - by.lr * g.sign(), {}
        m = _kept(state, "momentum", w, self.momentum).sub_(g + by.wd * w, alpha=1 - self.momentum)
        return (1 - by.lr * self.wd_lh) * w + by.lr * m.sign(), {"momentum": m}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba, 2014), with ``epsilon`` beside the uncorrected root, as MXNet has it."""

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay = "before"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """``w − η √(1 − β₂ᵗ) / (1 − β₁ᵗ) · mean / (√var + ε)``."""
        mean, var = _moments(state, w, g, self.beta1, self.beta2)
        lr = by.lr * math.sqrt(1 - self.beta2**by.t) / (1 - self.beta1**by.t)
        return w - lr * mean / (var.sqrt() + self.epsilon), {"mean": mean, "var": var}


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019)."""

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    correct_bias: bool = True
    decay = "never"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Like :class:`Adam`, then ``w ← w − η · wd · w`` with the corrected η."""
        mean, var = _moments(state, w, g, self.beta1, self.beta2)
        lr = by.lr
        if self.correct_bias:
            lr *= math.sqrt(1 - self.beta2**by.t) / (1 - self.beta1**by.t)
        new = w - lr * mean / (var.sqrt() + self.epsilon)
        return new - lr * by.wd * new, {"mean": mean, "var": var}


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adam with the infinity norm (Kingma & Ba, 2014, section 7)."""

    learning_rate: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    decay = "before"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """``w − η / (1 − β₁ᵗ) · mean / norm``; where the norm is 0 nothing was ever pushed."""
        mean = _kept(state, "mean", w, self.beta1).add_(g, alpha=1 - self.beta1)
        norm = torch.maximum(_kept(state, "norm", w, self.beta2), g.abs())
        step = torch.where(norm > 0, mean / norm, torch.zeros_like(norm))
        return w - by.lr / (1 - self.beta1**by.t) * step, {"mean": mean, "norm": norm}


@dataclass(frozen=True)
class Nadam(Optimizer):
    """Adam with Nesterov momentum (Dozat, 2016)."""

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    schedule_decay: float = 0.004
    decay = "before"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Like :class:`Adam`, looking one momentum step ahead."""
        now, after = (
            self.beta1 * (1 - 0.5 * 0.96 ** (t * self.schedule_decay)) for t in (by.t, by.t + 1)
        )
        before = state.get("schedule")
        schedule = now if before is None else float(before) * now
        mean, var = _moments(state, w, g, self.beta1, self.beta2)
        ahead = (1 - now) * g / (1 - schedule) + after * mean / (1 - schedule * after)
        new = w - by.lr * ahead / ((var / (1 - self.beta2**by.t)).sqrt() + self.epsilon)
        told = torch.tensor(schedule, dtype=torch.float64)
        return new, {"mean": mean, "var": var, "schedule": told}


@dataclass(frozen=True)
class AdaGrad(Optimizer):
    """Smaller steps where gradients were large (Duchi et al., 2011)."""

    learning_rate: float = 0.01
    eps: float = 1e-7
    decay = "never"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """``w − η (g / √(Σ g² + eps) + wd · w)``."""
        history = _kept(state, "history", w) + g.square()
        return w - by.lr * (g / (history + self.eps).sqrt() + by.wd * w), {"history": history}


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """Steps divided by a moving root mean square (Tieleman & Hinton, 2012).

    Args:
        learning_rate: step size η.
        gamma1: of the moving averages.
        gamma2: momentum, if ``centered``.
        epsilon: under the root.
        centered: Graves's version of 2013, which divides by the standard deviation.
        clip_weights: bound on the absolute value of each weight; None for none.
    """

    learning_rate: float = 0.001
    gamma1: float = 0.9
    gamma2: float = 0.9
    epsilon: float = 1e-8
    centered: bool = False
    clip_weights: float | None = None
    decay = "before"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Same as above."""
        n = _kept(state, "n", w, self.gamma1).addcmul_(g, g, value=1 - self.gamma1)
        kept = {"n": n}
        if self.centered:
            mean = _kept(state, "g", w, self.gamma1).add_(g, alpha=1 - self.gamma1)
            root = (n - mean.square() + self.epsilon).sqrt()
            kept |= {"g": mean, "delta": _kept(state, "delta", w, self.gamma2) - by.lr * g / root}
            new = w + kept["delta"]
        else:
            new = w - by.lr * g / (n + self.epsilon).sqrt()
        clip = self.clip_weights
        return new if clip is None else new.clamp(-clip, clip), kept


@dataclass(frozen=True)
class AdaDelta(Optimizer):
    """Steps in the units of the weights (Zeiler, 2012)."""

    learning_rate: float = 1.0
    rho: float = 0.9
    epsilon: float = 1e-5
    decay = "never"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """``w − η (Δ + wd · w)``, where Δ is g in units of the last steps."""
        acc_g = _kept(state, "acc_g", w, self.rho).addcmul_(g, g, value=1 - self.rho)
        before = _kept(state, "acc_delta", w)
        delta = (before + self.epsilon).sqrt() / (acc_g + self.epsilon).sqrt() * g
        acc_delta = self.rho * before + (1 - self.rho) * delta.square()
        return w - by.lr * (delta + by.wd * w), {"acc_g": acc_g, "acc_delta": acc_delta}


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """Follow the regularised leader: sparse weights (McMahan et al., 2013)."""

    learning_rate: float = 0.1
    lamda1: float = 0.01
    beta: float = 1.0
    decay = "never"

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """0 where the sum of gradients is within ``lamda1``."""
        n0 = _kept(state, "n", w)
        n = n0 + g.square()
        z = _kept(state, "z", w) + g - (n.sqrt() - n0.sqrt()) * w / by.lr
        step = (z.sign() * self.lamda1 - z) / ((self.beta + n.sqrt()) / by.lr + by.wd)
        return step * (z.abs() > self.lamda1), {"n": n, "z": z}


@dataclass(frozen=True)
class Test(Optimizer):
    """MXNet's optimizer for tests: ``w ← w + rescale_grad · gradient``."""

    decay = "never"
    __test__ = False  # not pytest's

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """Same as above."""
        return w + g, {}


def _kept(state: State, name: str, like: Tensor, factor: float = 1.0) -> Tensor:
    """The state, times a factor, as a new tensor; zeros at first."""
    before = state.get(name)
    return torch.zeros_like(like) if before is None else before * factor


def _moments(
    state: State, like: Tensor, g: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Moving averages of the gradient and of its square."""
    mean = _kept(state, "mean", like, beta1).add_(g, alpha=1 - beta1)
    return mean, _kept(state, "var", like, beta2).addcmul_(g, g, value=1 - beta2)


# -- torch's ----------------------------------------------------------------------

#: How torch computes, not what.
_HOW = ("foreach", "fused", "capturable", "differentiable")
#: Those that need more than a gradient.
_NOT = {"Optimizer", "LBFGS", "SparseAdam"}

_TORCH: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in _NOT
}


@dataclass(frozen=True)
class Torch(Optimizer):
    """An optimizer of ``torch.optim``: one step of it at a time, on weights that a server has.

    Args:
        kind: the name of its class.
        options: its options other than ``lr`` and ``weight_decay``, which are ``learning_rate``
            and ``wd`` here.

    Raises:
        KVStoreError: there is none, or it does not take these options.

    >>> Torch.of("Adagrad", lr=0.5).apply(torch.tensor([1.0]), torch.tensor([2.0]), {})[0]
    tensor([0.5000])
    """

    kind: str = "SGD"
    options: Mapping[str, Any] = field(default_factory=dict)
    decay = "never"

    @classmethod
    def of(cls, kind: str, **options: Any) -> Torch:
        """An optimizer by torch's names of its options; those of :class:`Optimizer` are as well."""
        if kind not in _TORCH:
            raise KVStoreError(
                f"torch.optim.{kind} cannot run on servers. There are: {', '.join(sorted(_TORCH))}."
            )
        takes, ours = _takes(kind), [f.name for f in fields(Optimizer)]
        if odd := [name for name in options if name not in {*takes, *ours, *_HOW}]:
            raise KVStoreError(
                f"torch.optim.{kind} with {', '.join(map(repr, odd))}. It takes "
                f"{', '.join(takes)}; and {', '.join(ours[2:])}."
            )
        given = {name: options.get(name, default) for name, default in takes.items()}
        common = {"learning_rate": given.pop("lr"), "wd": given.pop("weight_decay", 0.0)}
        common |= {name: options[name] for name in ours if name in options}
        if common["wd"] and "weight_decay" not in takes:
            raise KVStoreError(f"torch.optim.{kind} has no weight decay. Leave out wd.")
        made = cls(kind=kind, options=_plain(given), **_plain(common))
        made.made  # noqa: B018 - it checks the options
        return made

    @cached_property
    def made(self) -> Any:
        """The optimizer itself, of nothing so far."""
        options = dict(self.options)
        for name in ("lr", "weight_decay"):
            if name in _takes(self.kind):
                options[name] = self.learning_rate if name == "lr" else self.wd
        if "foreach" in inspect.signature(_TORCH[self.kind]).parameters:
            options["foreach"] = False
        try:
            return _TORCH[self.kind]([torch.zeros(1, 1)], **options)
        except (TypeError, ValueError, RuntimeError) as e:
            raise KVStoreError(f"torch.optim.{self.kind}: {e}.") from None

    def goes_on(self, before: Optimizer) -> bool:
        """Only with its own, from the same options: they decide what there is."""
        if not isinstance(before, Torch):
            return False
        return (before.kind, before.options) == (self.kind, self.options)

    @property
    def default_rate(self) -> float:
        """Same as in torch."""
        return float(_takes(self.kind)["lr"])

    @property
    def whole(self) -> bool:
        """Those that look at rows and columns."""
        return self.kind in ("Adafactor", "Muon")

    def refuses(self, shape: tuple[int, ...]) -> str:
        """Muon is for matrices."""
        return "it updates matrices only" if self.kind == "Muon" and len(shape) != 2 else ""

    def _names(self, dims: int) -> set[str]:
        """The state of arrays of so many dimensions; with a part of that it begins anew."""
        known: dict[int, set[str]] = self.__dict__.setdefault("_known", {})
        if dims not in known:
            known[dims] = set(self.kept(torch.zeros([1] * dims)))
        return known[dims]

    def update(self, w: Tensor, g: Tensor, state: State, by: Hyper) -> tuple[Tensor, State]:
        """One step of torch's; the states given are its own from now on."""
        new, optimizer = empty_like(w).copy_(w), self.made
        group = optimizer.param_groups[0]
        group |= {"params": [new], "lr": by.lr}
        if "weight_decay" in group:
            group["weight_decay"] = by.wd
        optimizer.state.clear()
        new.grad = g
        if state and state.keys() >= self._names(w.dim()):
            optimizer.state[new].update(state)
        optimizer.step()
        kept = {k: torch.as_tensor(v) for k, v in optimizer.state[new].items() if v is not None}
        optimizer.state.clear()
        new.grad = group["params"][0] = None
        group["params"] = []
        return new, kept


def _takes(kind: str) -> dict[str, Any]:
    """The options of a class of torch's, with their defaults."""
    given = inspect.signature(_TORCH[kind]).parameters
    return {name: p.default for name, p in given.items() if name not in ("params", *_HOW)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON can have them: tensors of one number as that, lists as tuples."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.item()
        return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value

    return {name: plain(value) for name, value in options.items()}


def from_torch(
    optimizer: torch.optim.Optimizer, keys: Mapping[int, Key] | None = None, **options: Any
) -> Torch:
    """The rule of an optimizer of ``torch.optim`` that has made no step.

    Args:
        optimizer: the instance.
        keys: of its parameters by ``id``: so that learning rate and weight decay may differ.
        options: those of :class:`Optimizer`.

    Raises:
        KVStoreError: it is no class of torch's, or its groups differ in what is not known here.
    """
    kind = type(optimizer).__name__
    if _TORCH.get(kind) is not type(optimizer):
        raise _no_rule(optimizer)
    groups, takes = optimizer.param_groups, [n for n in _takes(kind) if n in optimizer.defaults]
    first = {n: groups[0][n] for n in takes}
    for n in takes:
        if n in ("lr", "weight_decay"):
            first[n] = max((float(g[n]) for g in groups), default=0.0)
        elif any(g[n] != first[n] for g in groups):
            raise KVStoreError(
                f"torch.optim.{kind} whose parameter groups differ in {n!r}: on "
                "servers they may differ in lr and weight_decay."
            )
    for n, mult in (("lr", "lr_mult"), ("weight_decay", "wd_mult")):
        differ = n in takes and len({float(g[n]) for g in groups}) > 1
        if differ and keys is None:
            raise KVStoreError(
                f"torch.optim.{kind} whose parameter groups differ in {n!r}: which "
                "key is which parameter? Give it to kvstore.Trainer, or use "
                f"{mult}={{key: factor}}."
            )
        if differ and keys is not None:
            options[mult] = {
                keys[id(p)]: float(g[n]) / first[n]
                for g in groups
                for p in g["params"]
                if id(p) in keys
            }
    return Torch.of(kind, **first, **options)


# -- by name, and on the way ------------------------------------------------------

_BY_NAME: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "nag": NAG,
    "adam": Adam,
    "adamw": AdamW,
    "adamax": Adamax,
    "nadam": Nadam,
    "adagrad": AdaGrad,
    "rmsprop": RMSProp,
    "adadelta": AdaDelta,
    "ftrl": Ftrl,
    "signum": Signum,
    "test": Test,
}


def create(name: str, /, **options: Any) -> Optimizer:
    """The optimizer of a name and options.

    Args:
        name: MXNet's, in any case, or ``"torch.optim.RAdam"``.
        options: by name.

    Raises:
        KVStoreError: unknown name or options.

    >>> create("sgd", learning_rate=0.1).learning_rate
    0.1
    """
    if name.startswith("torch.optim."):
        return Torch.of(name.removeprefix("torch.optim."), **options)
    kind = _BY_NAME.get(name.lower())
    if kind is None:
        raise KVStoreError(
            f"there is no optimizer {name!r}. The servers know: {', '.join(_BY_NAME)}; and those "
            f"of torch.optim, such as torch.optim.RAdam: {', '.join(sorted(_TORCH))}."
        )
    made = kind(**options)
    _check(made)
    return made


def rule_of(given: Any, options: Mapping[str, Any] | None = None) -> Optimizer:
    """The rule that somebody means by a name, an instance, or a class of ``torch.optim``.

    Raises:
        KVStoreError: it is none that servers know, or its options are not.
    """
    options = dict(options or {})
    if isinstance(given, str):
        return create(given, **options)
    if isinstance(given, type) and _TORCH.get(given.__name__, type) is given:
        return Torch.of(given.__name__, **options)
    if isinstance(given, type) and given in _BY_NAME.values():
        return given(**options)  # type: ignore[no-any-return]
    if isinstance(given, torch.optim.Optimizer):
        if given.state:
            raise KVStoreError(
                f"{named(type(given))} has already made steps, and its state would be lost. Give "
                "a new one."
            )
        return from_torch(given, **options)
    if isinstance(given, Optimizer) and not options:
        to_spec(given)
        return given
    if isinstance(given, Optimizer):
        raise KVStoreError("options beside an optimizer that has them. Give one.")
    raise _no_rule(given)


def _no_rule(given: Any) -> KVStoreError:
    is_class = isinstance(given, type)
    what = f"the class {named(given)}" if is_class else named(type(given))
    return KVStoreError(
        f"set_optimizer got {what}. Code cannot be sent to servers: give a name that they know, "
        f"such as {', '.join(map(repr, [*_BY_NAME][:3]))}, a rule such as "
        "kvstore.SGD(learning_rate=0.1), or a class or instance of torch.optim: "
        f"{', '.join(sorted(_TORCH))}."
    )


def to_spec(rule: Optimizer) -> tuple[str, dict[str, Any]]:
    """An optimizer as a name and plain values, to send it.

    Raises:
        KVStoreError: it is none of this module's, or a value cannot be sent.
    """
    name = next((n for n, kind in _BY_NAME.items() if kind is type(rule)), "")
    if not name and type(rule) is not Torch:
        raise _no_rule(rule)
    options: dict[str, Any] = {f.name: getattr(rule, f.name) for f in fields(rule)}
    _check(rule)
    for mult in ("lr_mult", "wd_mult"):
        options[mult] = [[key, factor] for key, factor in options[mult].items()]
    options["lr_scheduler"] = schedulers.to_spec(rule.lr_scheduler)
    if isinstance(rule, Torch):
        name = f"torch.optim.{options.pop('kind')}"
        options["options"] = dict(rule.options)
    return name, options


def from_spec(name: str, spec: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a name and plain values, from anybody: nothing of it is executed.

    Raises:
        KVStoreError: unknown name or options.
    """
    options = dict(spec)
    for mult in ("lr_mult", "wd_mult"):
        try:
            options[mult] = {key: float(factor) for key, factor in options.get(mult, ())}
        except (TypeError, ValueError):
            raise KVStoreError(f"{mult}: give a factor for each key.") from None
    if "lr_scheduler" in options:
        options["lr_scheduler"] = schedulers.from_spec(options["lr_scheduler"])
    inner = options.pop("options", {})
    if not isinstance(inner, dict) or inner.keys() & options.keys():
        raise KVStoreError(f"optimizer {name!r} with options={inner!r:.60}.")
    made = create(name, **options, **inner)
    try:
        made.apply(torch.zeros(1, 1), torch.ones(1, 1), {})
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as e:
        raise KVStoreError(f"optimizer {name!r} cannot make a step: {e}.") from None
    return made


#: What a field of an optimizer may be, by its annotation.
_TYPES: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "bool": (bool, int, float),
}


def _check(rule: Optimizer) -> None:
    """Refuse what is no number where one belongs.

    Raises:
        KVStoreError: there is such an option.
    """
    for f in fields(rule):
        value = getattr(rule, f.name)
        if not isinstance(value, _TYPES.get(str(f.type), object)):
            raise KVStoreError(
                f"optimizer {type(rule).__name__} with {f.name}={value!r:.60}: give a number."
            )
    for mult in (rule.lr_mult, rule.wd_mult):
        if not isinstance(mult, Mapping):
            raise KVStoreError(f"lr_mult or wd_mult of {mult!r:.60}. Give {{key: factor}}.")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(rule, name, 0) < 1:
            raise KVStoreError(
                f"optimizer {type(rule).__name__} with {name}="
                f"{getattr(rule, name)}: from 0 to below 1."
            )
