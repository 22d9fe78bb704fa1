"""The sets of data: the same everywhere."""

from __future__ import annotations

import pytest

from distkit.data import digits


def test_the_digits_of_one_caller_are_its_own() -> None:
    pytest.importorskip("sklearn")
    images, labels = digits()
    images.zero_(), labels.zero_()
    again, others = digits()
    assert again.max() == 1
    assert others.max() == 9
