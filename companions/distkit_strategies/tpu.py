"""Replicas on the cores of a TPU."""

from __future__ import annotations

import importlib.util

import torch

from distkit.errors import StrategyError
from distkit_strategies.mirrored import MirroredStrategy


class TPUStrategy(MirroredStrategy):
    """:class:`MirroredStrategy` over XLA devices, one replica on each core.

    Run it where ``torch_xla`` starts a process for each core; gradients are summed by the XLA
    backend of the process group. It has not been run on a TPU by distkit's own tests.

    Raises:
        StrategyError: ``torch_xla`` is not installed.

    Source:
        TensorFlow, ``tf.distribute.TPUStrategy``; PyTorch/XLA, "xla" backend.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("torch_xla") is None:
            raise StrategyError(
                "TPUStrategy needs torch_xla and a TPU; torch_xla is not installed here. The same "
                "program runs under MirroredStrategy() on CPUs and GPUs."
            )
        super().__init__()

    @property
    def device(self) -> torch.device:
        """This replica's core."""
        return torch.device("xla")
