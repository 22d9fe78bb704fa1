"""The sets of data: the same everywhere."""

from __future__ import annotations

import pytest
import torch

from distkit.data import digits, synthetic


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
