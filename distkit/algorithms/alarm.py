"""A gradient that is NaN or infinite on one replica, made known to all of them.

The alarm travels within the message that the replicas exchange anyway: a table with a number for
each rank, which is 0 where all is well. Nobody has to ask, so nobody is left waiting for an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from distkit.errors import TrainingError

#: How many steps each model has made, by its first parameter.
_steps = WeakTensorKeyDictionary()


def trained(model: nn.Module | Iterable[Tensor]) -> dict[str, Tensor]:
    """The parameters that have gradients by name, in the order of the layers."""
    if isinstance(model, nn.Module):
        return {name: w for name, w in model.named_parameters() if w.requires_grad}
    return {f"parameter {i}": w for i, w in enumerate(model)}


def first_bad(gradients: Sequence[Tensor]) -> int:
    """The number, from 1, of the first layer whose gradient is NaN or infinite; 0 for none.

    The first one in the order of ``backward``: there a NaN of the loss, or of a layer, spreads
    towards the first layers.
    """
    bad = [i for i, g in enumerate(gradients, 1) if not torch.isfinite(g).all()]
    return max(bad, default=0)


def raise_alarm(alarms: Sequence[float], weights: Mapping[str, Tensor]) -> None:
    """Raise an alarm, if there is one: the table has a number that is not 0 for a rank.

    Raises:
        TrainingError: a gradient is NaN or infinite on some rank; on all of them.
    """
    names, (first, *_) = list(weights), weights.values()
    step = _steps[first] = _steps.get(first, 0) + 1
    if not any(alarms):
        return
    found = [(rank, names[int(layer) - 1]) for rank, layer in enumerate(alarms) if layer]
    where = "; ".join(f"rank {rank}: {layer}" for rank, layer in found)
    raise TrainingError(
        f"step {step}: gradients are NaN or infinite on {len(found)} of {len(alarms)} ranks. Where "
        f"backward met the first of them: {where}. Look at these ranks' loss and examples in this "
        "step; if it happens on all ranks after some steps, lower the learning rate.",
        rank=found[0][0],
        step=step,
        layer=found[0][1],
    )
