"""Runs a test on several devices: the CPU and, if available, a GPU.

Tests that need one GPU are marked ``gpu``; tests that need two, ``gpu(2)``.
"""

import pytest

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.stand_in),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ],
)
