"""A dataset of handwritten digits for training."""

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

    They are read directly from scikit-learn's data file, because importing scikit-learn takes a
    second on every rank.

    Returns:
        Images (1797, 64) float32 in [0, 1], and labels (1797,) int64; both are copies.
    """
    images, labels = _digits()
    return images.clone(), labels.clone()


@lru_cache(1)
def _digits() -> tuple[Tensor, Tensor]:
    import numpy as np
    import torch

    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DistkitError("the digits are part of scikit-learn. Run: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return table[:, :-1] / 16, table[:, -1].long()
