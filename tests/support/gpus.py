"""GPUs of a machine that has none: NVML's library, and what it tells."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distkit.cluster.gpus import Gpu, Gpus

GIB = 1 << 30


def some_gpus(n: int, nccl: Sequence[int] = (2, 29, 7), **facts: Any) -> Gpus:
    """So many GPUs of 80 GiB, with torch's NCCL."""
    gpu = Gpu(0, "NVIDIA H100", "GPU-0", 80 * GIB, 80 * GIB)
    each = tuple(replace(gpu, **{"index": i, "uuid": f"GPU-{i}", **facts}) for i in range(n))
    return Gpus(each, None, tuple(nccl))


@dataclass
class Device:
    """A GPU that NVML knows; ``slices`` is None without MIG."""

    uuid: str
    slices: int | None = None
    lost: bool = False

    @property
    def parts(self) -> list[Device]:
        """Its slices."""
        return [Device(f"MIG-{self.uuid}{n}") for n in range(self.slices or 0)]


_WORDS = {3: "Not Supported", 6: "Not Found", 15: "GPU is lost"}


class Nvml:
    """The functions of libnvidia-ml that distkit calls."""

    def __init__(self) -> None:
        self.gpus: list[Device] = []
        self.users: dict[int, int] = {}
        self.code = 0  # of its start

        def words(code: int) -> bytes:
            return _WORDS.get(code, "Driver/library version mismatch").encode()

        self.nvmlErrorString = words
        self._handles: list[Device] = []

    def _hand(self, handle: Any, device: Device) -> int:
        self._handles.append(device)
        handle._obj.value = len(self._handles)
        return 15 if device.lost else 0

    def _device(self, handle: ctypes.c_void_p) -> Device:
        return self._handles[(handle.value or 0) - 1]

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 13000
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.65.06"
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return self._hand(handle, self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        known = [gpu for gpu in self.gpus if gpu.uuid == uuid.decode()]
        return self._hand(handle, known[0]) if known else 6

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: int) -> int:
        text.value = self._device(handle).uuid.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, numbers: Any) -> int:
        numbers._obj[:] = (100, 60, 40)
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, now: Any, later: Any) -> int:
        if self._device(handle).slices is None:
            return 3
        now._obj.value = later._obj.value = 1
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, number: Any) -> int:
        number._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, n: int, part: Any) -> int:
        parts = self._device(handle).parts
        return self._hand(part, parts[n]) if n < len(parts) else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, room: Any, found: Any) -> int:
        room._obj.value = len(self.users)
        for n, (pid, size) in enumerate(self.users.items()):
            found[n].pid, found[n].bytes = pid, size
        return 0
