"""The digits dataset."""

from __future__ import annotations

import pytest

from distkit.data import digits


def test_digits_are_copied_for_each_caller() -> None:
    pytest.importorskip("sklearn")
    images, labels = digits()
    images.zero_(), labels.zero_()
    images, labels = digits()
    assert images.max() == 1
    assert labels.max() == 9
