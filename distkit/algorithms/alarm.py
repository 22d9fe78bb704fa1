"""Detection of NaN or infinite gradients on any replica, with an error on all replicas.

Replicas add flags to a message that they exchange anyway: one number per rank, 0 if its gradients
are finite. No extra communication is needed, so no rank can hang in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from distkit.errors import TrainingError

#: Number of steps of each model, by its first parameter.
_steps = WeakTensorKeyDictionary()


def trainable_parameters(model: nn.Module | Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the trainable parameters by name, in layer order."""
    if isinstance(model, nn.Module):
        return {name: w for name, w in model.named_parameters() if w.requires_grad}
    return {f"parameter {i}": w for i, w in enumerate(model)}


def first_nonfinite(gradients: Sequence[Tensor]) -> int:
    """Return the number, from 1, of the layer with the first NaN or infinite gradient; 0 if none.

    The first one in the order of ``backward``, because a NaN spreads from the loss to lower layers.
    """
    nonfinite = [i for i, g in enumerate(gradients, 1) if not torch.isfinite(g).all()]
    return max(nonfinite, default=0)


def raise_if_nonfinite(flags: Sequence[float], weights: Mapping[str, Tensor]) -> None:
    """Raise an error if any rank reported a non-finite gradient.

    Raises:
        TrainingError: A gradient is NaN or infinite on some rank; raised on all ranks.
    """
    names, (first, *_) = list(weights), weights.values()
    step = _steps[first] = _steps.get(first, 0) + 1
    if not any(flags):
        return
    causes = [(rank, names[int(layer) - 1]) for rank, layer in enumerate(flags) if layer]
    layers = "; ".join(f"rank {rank}: {layer}" for rank, layer in causes)
    raise TrainingError(
        f"step {step}: gradients are NaN or infinite on {len(causes)} of {len(flags)} ranks. The "
        f"first layer affected in backward: {layers}. Check the loss and examples of these ranks "
        "in this step; if it happens on all ranks after some steps, lower the learning rate.",
        rank=causes[0][0],
        step=step,
        layer=causes[0][1],
    )
