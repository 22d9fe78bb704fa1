"""The rules by which a server turns a gradient into the next version of a weight."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from distkit.errors import KVStoreError

if TYPE_CHECKING:
    from torch import Tensor


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

    >>> SGD(learning_rate=0.5).update(torch.tensor([1.0]), torch.tensor([2.0]), None)
    (tensor([0.]), None)
    """

    learning_rate: float = 0.01
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next weight and the next momentum; neither argument is changed."""
        g = gradient if self.rescale_grad == 1 else gradient * self.rescale_grad
        if self.clip_gradient is not None:
            g = g.clamp(-self.clip_gradient, self.clip_gradient)
        if self.wd:
            g = g.add(weight, alpha=self.wd)
        if not self.momentum:
            return weight.add(g, alpha=-self.learning_rate), None
        kept = torch.zeros_like(weight) if momentum is None else momentum * self.momentum
        step = kept.sub_(g, alpha=self.learning_rate)
        return weight + step, step


_BY_NAME = {"sgd": SGD}


def to_spec(optimizer: object) -> tuple[str, dict[str, float]]:
    """An optimizer as a name and numbers, to send it.

    Raises:
        KVStoreError: it is none of this module's.
    """
    for name, kind in _BY_NAME.items():
        if isinstance(optimizer, kind):
            options = {k: float(v) for k, v in asdict(optimizer).items() if v is not None}
            return name, options
    raise KVStoreError(
        f"set_optimizer got {optimizer!r}, which no server knows. "
        "Give one of distkit.kvstore's, such as SGD(learning_rate=0.1)."
    )


def from_spec(name: str, options: dict[str, Any]) -> SGD:
    """The optimizer of a name and numbers.

    Raises:
        KVStoreError: unknown name or options.
    """
    try:
        return _BY_NAME[name](**options)
    except (KeyError, TypeError):
        known = ", ".join(_BY_NAME)
        raise KVStoreError(
            f"no optimizer {name!r} with {sorted(options)}. The servers know: {known}."
        ) from None
