"""The sets of data: made up the same everywhere, or read from files that are there."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from distkit.data import cifar10, digits, mnist, synthetic
from distkit.errors import DistkitError


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def test_the_synthetic_set_is_the_same_everywhere_and_can_be_learned() -> None:
    x, y = synthetic(2000)
    assert all(map(torch.equal, (x, y), synthetic(2000)))
    assert not torch.equal(x, synthetic(2000, seed=1)[0])
    centres = torch.stack([x[:1000][y[:1000] == c].mean(0) for c in range(10)])
    assert (torch.cdist(x[1000:], centres).argmin(1) == y[1000:]).float().mean() > 0.9


def test_the_digits_of_one_caller_are_its_own() -> None:
    pytest.importorskip("sklearn")
    images, labels = digits()
    images.zero_(), labels.zero_()
    again, others = digits()
    assert again.max() == 1
    assert others.max() == 9


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "MNIST/raw"])
def test_mnist_is_read(tmp_path: Path, packed: bool, inside: str) -> None:
    images = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    for what, array in (("images-idx3", images), ("labels-idx1", np.array([7, 0, 9], np.uint8))):
        file = tmp_path / inside / f"t10k-{what}-ubyte{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    x, y = mnist(tmp_path, train=False)
    assert torch.equal(x * 255, torch.from_numpy(images).reshape(3, 784).float())
    assert y.tolist() == [7, 0, 9]
    with pytest.raises(DistkitError, match=r"no train-images-idx3-ubyte: torchvision"):
        mnist(tmp_path)


def test_cifar_is_read(tmp_path: Path) -> None:
    records = np.random.default_rng(0).integers(0, 256, (10, 3073), dtype=np.uint8)
    for i in range(5):
        (tmp_path / f"data_batch_{i + 1}.bin").write_bytes(records[2 * i : 2 * i + 2].tobytes())
    x, y = cifar10(tmp_path)
    assert torch.equal(x.flatten(1) * 255, torch.from_numpy(records[:, 1:]).float())
    assert y.tolist() == records[:, 0].tolist()
    with pytest.raises(DistkitError, match=r"no test_batch.bin: unpack"):
        cifar10(tmp_path, train=False)


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 3, 3), np.uint8))[:-1])
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 3000)
    with pytest.raises(DistkitError, match=r"no IDX file.*Get it again"):
        mnist(tmp_path)
    with pytest.raises(DistkitError, match="3,073 bytes"):
        cifar10(tmp_path, train=False)
