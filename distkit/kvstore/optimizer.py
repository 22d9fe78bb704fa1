"""The rules by which a server turns a gradient into the next version of a weight."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from distkit.errors import KVStoreError
from distkit.kvstore.memory import empty_like
from distkit.kvstore.tensors import named

if TYPE_CHECKING:
    from torch import Tensor

#: What an optimizer may keep of a key.
SLOTS = ("momentum", "master")


@dataclass(frozen=True)
class Slots:
    """What an optimizer keeps of a key: its last step, and the weight in full precision."""

    momentum: Tensor | None = None
    master: Tensor | None = None


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum and weight decay, as MXNet defines it.

    ::

        g ← clip(rescale_grad · gradient) + wd · w
        m ← momentum · m − learning_rate · g
        w ← w + m

    Args:
        learning_rate: step size η.
        momentum: how much of the last step is kept, 0 to 1.
        wd: weight decay, the L2 penalty's factor.
        rescale_grad: factor on every pushed gradient. Under ``dist_sync`` the server *sums* the
            workers' gradients: 1 / number of workers makes it their mean.
        clip_gradient: bound on the absolute value of each rescaled element; None for none.
        multi_precision: update weights of 16 bits in a float32 copy, and round that.

    >>> SGD(learning_rate=0.5).update(torch.tensor([1.0]), torch.tensor([2.0]), None)
    (tensor([0.]), None)
    """

    learning_rate: float = 0.01
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    multi_precision: bool = False

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next weight and the next momentum; neither argument is changed."""
        g = gradient
        if self.rescale_grad != 1:
            g = torch.mul(g, self.rescale_grad, out=empty_like(g))
        if self.clip_gradient is not None:
            g = g.clamp(-self.clip_gradient, self.clip_gradient)
        if self.wd:
            g = g.add(weight, alpha=self.wd)
        if not self.momentum:
            return torch.add(weight, g, alpha=-self.learning_rate, out=empty_like(weight)), None
        kept = torch.zeros_like(weight) if momentum is None else momentum * self.momentum
        step = kept.sub_(g, alpha=self.learning_rate)
        return torch.add(weight, step, out=empty_like(weight)), step

    def apply(self, value: Tensor, gradient: Tensor, slots: Slots) -> tuple[Tensor, Slots]:
        """The next value of a key, and what is kept for the one after."""
        if not (self.multi_precision and value.dtype in (torch.float16, torch.bfloat16)):
            value, momentum = self.update(value, gradient, slots.momentum)
            return value, Slots(momentum, slots.master)
        master = value.float() if slots.master is None else slots.master
        master, momentum = self.update(master, gradient.float(), slots.momentum)
        return master.to(value.dtype), Slots(momentum, master)


_BY_NAME = {"sgd": SGD}


def make(name: str, options: dict[str, Any]) -> SGD:
    """The optimizer of a name and options.

    Raises:
        KVStoreError: unknown name or options.

    >>> make("sgd", {"learning_rate": 0.1}).learning_rate
    0.1
    """
    made = _BY_NAME.get(name)
    if made is None:
        raise KVStoreError(
            f"there is no optimizer {name!r}. The servers know: {', '.join(_BY_NAME)}."
        )
    takes = [f.name for f in fields(made)]
    if odd := [option for option in options if option not in takes]:
        raise KVStoreError(
            f"optimizer {name!r} with {', '.join(map(repr, odd))}. It takes {', '.join(takes)}."
        )
    return made(**options)


def to_spec(optimizer: Any) -> tuple[str, dict[str, float]]:
    """An optimizer as a name and numbers, to send it.

    Raises:
        KVStoreError: it is none of this module's.
    """
    for name, kind in _BY_NAME.items():
        if isinstance(optimizer, kind):
            options = {k: float(v) for k, v in asdict(optimizer).items() if v is not None}
            return name, options
    is_class = isinstance(optimizer, type)
    what = f"the class {named(optimizer)}" if is_class else named(type(optimizer))
    raise KVStoreError(
        f"set_optimizer got {what}. Give a rule that the servers know, such as "
        "kvstore.SGD(learning_rate=0.1); it takes no parameters, since the servers have them."
    )


def from_spec(name: str, options: dict[str, float]) -> SGD:
    """The optimizer of a name and numbers.

    Raises:
        KVStoreError: unknown name or options.
    """
    found = make(name, options)
    return replace(found, multi_precision=bool(found.multi_precision))
