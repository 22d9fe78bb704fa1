"""Parametrizes tests over devices: the CPU, and a GPU if there is one.

``on_devices`` runs a test with a parameter ``device`` on the CPU, and on a GPU if there is one.
Tests that need a GPU are marked ``gpu``, or ``gpu(2)`` for two.
"""

import pytest

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.stand_in),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ],
)
