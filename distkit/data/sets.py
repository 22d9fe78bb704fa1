"""Data sets for training: handwritten digits, and synthetic data of any size."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import DistkitError

if TYPE_CHECKING:
    from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """Load scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels.

    They are read from its file, because importing scikit-learn takes a second on every rank.

    Returns:
        Images (1797, 64) float32 in [0, 1], and labels (1797,) int64; copies.
    """
    images, labels = _digits()
    return images.clone(), labels.clone()


@lru_cache(1)
def _digits() -> tuple[Tensor, Tensor]:
    import numpy as np
    import torch

    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DistkitError("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return table[:, :-1] / 16, table[:, -1].long()


def synthetic(
    samples: int = 20_000, features: int = 256, classes: int = 10, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Generate a data set: points around a centre per class, the same on every rank.

    Args:
        samples: number of points, N.
        features: their dimension, F.
        classes: number of centres; consecutive samples cycle through the classes.
        seed: seed of the centres and the noise.

    Returns:
        Points (N, F) float32, and labels (N,) int64.

    >>> x, y = synthetic(6, 4, classes=3)
    >>> tuple(x.shape), y.tolist()
    ((6, 4), [0, 1, 2, 0, 1, 2])
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % classes
    centres = torch.randn(classes, features, generator=draw)
    return centres[labels] + 2 * torch.randn(samples, features, generator=draw), labels
