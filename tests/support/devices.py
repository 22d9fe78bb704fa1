"""Tests of what happens on a GPU, which the CPU stands in for where there is none.

A test with a parameter ``device`` under ``on_devices`` runs on the CPU everywhere, and where there
is a GPU on that, too. What has no stand-in is marked ``gpu``, or ``gpu(2)`` if it needs two.
"""

import pytest

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.stand_in),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ],
)
