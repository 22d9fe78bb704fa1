"""Counting calls of ``torch.distributed.rpc``: they are no events, and the trace says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from distkit.recording import recorder as _recorder

#: How the trace tells of them.
NOT_RECORDED = "calls of torch.distributed.rpc are not recorded"

#: Through these ``rpc_sync``, ``rpc_async`` and ``remote`` leave the rank.
_WAYS = (
    "_invoke_rpc",
    "_invoke_remote_builtin",
    "_invoke_remote_torchscript",
    "_invoke_remote_python_udf",
)


class Remote:
    """The hooks of ``torch.distributed.rpc``."""

    def __init__(self) -> None:
        self._stock: dict[str, Any] = {}

    def install(self) -> None:
        """Count the calls from now on."""
        if not dist.rpc.is_available():
            return
        self._stock = {way: getattr(dist.rpc.api, way) for way in _WAYS}
        for way, call in self._stock.items():
            setattr(dist.rpc.api, way, _counting(call))

    def remove(self) -> None:
        """Restore stock torch."""
        for way, call in self._stock.items():
            setattr(dist.rpc.api, way, call)
        self._stock.clear()


def _counting(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def counting(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.current()
        if recorder is not None:
            recorder.miss(NOT_RECORDED)
        return call(*args, **kwargs)

    return counting
