"""Parametrizes tests over devices: the CPU, and a GPU if available.

``on_devices`` runs a test with its parameter ``device`` set to the CPU and, if available, to a GPU.
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
