"""Sets to train on: one that is always there, one that is made up, and two that are read."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import DistkitError

#: Bytes of an image of CIFAR-10, after one for its label.
_CIFAR = 3 * 32 * 32

if TYPE_CHECKING:
    from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, shipped with it.

    Read from its file: importing scikit-learn would cost every rank a second.

    Returns:
        Images (1797, 64) float32 in [0, 1], and labels (1797,) int64; the caller's own.
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
    """A set of any size: points around a centre for each class, the same on every rank.

    Args:
        samples: how many points, N.
        features: their dimension, F.
        classes: how many centres; the classes take turns.
        seed: of the centres and of the noise.

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


def mnist(folder: str | Path, *, train: bool = True) -> tuple[Tensor, Tensor]:
    """MNIST's handwritten digits, from its files in a folder; nothing is downloaded.

    Args:
        folder: has ``train-images-idx3-ubyte`` and its siblings, perhaps with ``.gz``, or is the
            folder of torchvision's ``MNIST``. Every rank reads it.
        train: the 60,000 images for training, or the 10,000 for tests.

    Returns:
        Images (N, 784) float32 in [0, 1], and labels (N,) int64.

    Raises:
        DistkitError: the files are not there, or are none of MNIST.

    Source:
        LeCun, Cortes, Burges, "The MNIST database".
    """
    part = "train" if train else "t10k"
    remedy = "torchvision.datasets.MNIST(folder, download=True) puts them there"
    images, labels = (
        _idx(_found(Path(folder), "MNIST/raw", f"{part}-{what}-ubyte", remedy), dimensions)
        for what, dimensions in (("images-idx3", 3), ("labels-idx1", 1))
    )
    return images.flatten(1).float() / 255, labels.long()


def cifar10(folder: str | Path, *, train: bool = True) -> tuple[Tensor, Tensor]:
    """CIFAR-10's photographs, from the files of its binary version; nothing is downloaded.

    Args:
        folder: has ``data_batch_1.bin`` and its siblings, perhaps in ``cifar-10-batches-bin``.
            Every rank reads it. The Python version consists of pickles, which may run anything.
        train: the 50,000 images for training, or the 10,000 for tests.

    Returns:
        Images (N, 3, 32, 32) float32 in [0, 1], and labels (N,) int64.

    Raises:
        DistkitError: the files are not there, or are none of CIFAR-10.

    Source:
        Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    import torch

    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    remedy = "unpack cifar-10-binary.tar.gz there"
    files = [_found(Path(folder), "cifar-10-batches-bin", name, remedy) for name in names]
    rows = torch.cat([_records(file) for file in files])
    return rows[:, 1:].reshape(-1, 3, 32, 32).float() / 255, rows[:, 0].long()


def _found(folder: Path, inside: str, name: str, remedy: str) -> Path:
    """A file in a folder, or where another program puts it, perhaps compressed."""
    places = [where / (name + end) for where in (folder, folder / inside) for end in ("", ".gz")]
    if not (found := [place for place in places if place.is_file()]):
        raise DistkitError(
            f"{folder} has no {name}: {remedy}. Every rank reads the files: the folder must be one "
            "that all ranks see. dk.data.synthetic() needs no files."
        )
    return found[0]


def _bytes(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _idx(file: Path, dimensions: int) -> Tensor:
    """The array of an IDX file: a magic number, the sizes, and the bytes."""
    import numpy as np
    import torch

    data = _bytes(file)
    head = 4 + 4 * dimensions
    sizes: Sequence[int] = np.frombuffer(data[4:head], ">i4").tolist()
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) - head != np.prod(sizes):
        raise DistkitError(f"{file} is no IDX file of bytes, or is damaged. Get it again.")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=head).reshape(sizes).copy())


def _records(file: Path) -> Tensor:
    import numpy as np
    import torch

    data = np.frombuffer(_bytes(file), np.uint8)
    if not len(data) or len(data) % (1 + _CIFAR):
        raise DistkitError(
            f"{file} does not consist of CIFAR-10's records of 3,073 bytes. Get it again."
        )
    return torch.from_numpy(data.reshape(-1, 1 + _CIFAR).copy())
