"""Everything on one device that you choose."""

from __future__ import annotations

from typing import Any

import torch

from distkit.errors import StrategyError
from distkit_strategies.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica on a chosen device: variables are made there, batches are moved there in time.

    A program that is written for it runs unchanged under every other strategy.

    Args:
        device: such as "cpu" or "cuda:1".

    Raises:
        StrategyError: there is no such device.

    >>> OneDeviceStrategy("cpu").num_replicas_in_sync
    1
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        if not is_present(torch.device(device)):
            raise StrategyError(f"There is no device {device} here. There are: {present()}.")


def is_present(device: torch.device) -> bool:
    """True if this machine has the device."""
    if device.type == "cpu":
        return True
    backend: Any = getattr(torch, device.type, None)
    return hasattr(backend, "device_count") and (device.index or 0) < backend.device_count()


def present() -> str:
    """The devices of this machine, as words."""
    cuda = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *cuda])
