"""Timing and tensor values of GPU operations, recorded without synchronizing the GPU.

A call enqueues work in a *stream* of the GPU and returns. The tap records *events* in the stream
before and after the work, and later queries whether the GPU has reached them. Values are
summarized on the GPU, in the same stream, and copied to host memory asynchronously.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from distkit.recording.encoding import Values

#: Held during event queries and while a CUDA graph is captured, because a capture fails if another
#: thread queries an event.
event_query_lock = threading.Lock()


class Device:
    """A GPU, accessed through torch's module for its type."""

    def __init__(self, device: torch.device) -> None:
        self._torch, self._device = torch.get_device_module(device), device
        self.clock = Clock()

    @property
    def stream(self) -> int:
        """The id of this thread's current stream."""
        return int(self._torch.current_stream(self._device).stream_id)

    @property
    def facts(self) -> tuple[tuple[str, Any], ...]:
        """The event attributes of a call made now."""
        return ("device", str(self._device)), ("stream", self.stream)

    @property
    def memory(self) -> int:
        """The number of bytes that this process's tensors occupy on the device."""
        return int(self._torch.memory_allocated(self._device))

    def event(self) -> Any:
        """Record an event in this thread's current stream."""
        event = self._torch.Event(enable_timing=True)
        self._torch.current_stream(self._device).record_event(event)
        return event

    def in_flight(self, work: Any, begin: Any, call_time: float) -> InFlight:
        """Return an operation that has completed on the host and still runs on the device."""
        return InFlight(self, work, begin, call_time)

    def captures(self) -> bool:
        """Return whether this thread's calls are being captured into a CUDA graph."""
        return bool(self._torch.is_current_stream_capturing())


device_of = cache(Device)


class DeferredSummary:
    """A summary of values that are still being copied from the GPU.

    Args:
        flat: the values to summarize, (k,), float64.
        stride: the distance between the recorded values.
        size: the number of elements of the tensor; ``flat`` may be a sample of them.
    """

    def __init__(self, flat: torch.Tensor, stride: int, size: int) -> None:
        device = device_of(flat.device)
        self.memory, self._size, self._sampled = device.memory, size, size > len(flat)
        square = flat.square().sum() * (size / len(flat))  # torch.dot would load cuBLAS
        numbers = torch.cat([flat[::stride], torch.stack([square, flat.min(), flat.max()])])
        self._numbers = torch.empty(
            numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda
        ).copy_(numbers, non_blocking=True)
        self._event = device.event()

    def poll(self) -> Values | None:
        """Return the fields of a Summary, as ``summarize`` does, or None until the copy is done."""
        if not _is_reached(self._event):
            return None
        *values, square, minimum, maximum = self._numbers.tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        return tuple(values), norm, minimum, maximum, self._size, self._sampled


class Clock:
    """Converts times of a device's events to the host's clock.

    The GPU reaches an event after the host records it and before the host observes its completion.
    These times bound the offset between the clocks. The bound is exact if the GPU was idle.

    >>> class At:
    ...     def __init__(self, ms): self.ms = ms
    ...     def elapsed_time(self, other): return other.ms - self.ms
    >>> clock = Clock()
    >>> clock.time(At(0), 10.0, At(2), 10.5)            # the GPU was idle
    10.002
    >>> round(clock.time(At(5), 10.001, At(7), 10.5), 6)  # it was busy
    10.007
    """

    def __init__(self) -> None:
        self._latest: Any = None  # latest ``begin`` event
        self._latest_time = 0.0  # time of that event on the device's clock [s]
        self._offset = -math.inf  # host's clock minus device's clock [s]

    def time(self, begin: Any, call_time: float, end: Any, seen_time: float) -> float:
        """Return the time of ``end`` on the host's clock [s].

        Args:
            begin: an earlier event.
            call_time: the time at which the host recorded ``begin`` [s].
            end: an event that the GPU has reached.
            seen_time: the time at which the host observed this [s].
        """
        elapsed = self._latest.elapsed_time(begin) / 1e3 if self._latest is not None else 0.0
        self._latest, self._latest_time = begin, self._latest_time + elapsed
        end_time = self._latest_time + begin.elapsed_time(end) / 1e3
        self._offset = min(max(self._offset, call_time - self._latest_time), seen_time - end_time)
        return max(call_time, float(end_time + self._offset))


class InFlight:
    """An operation that has completed on the host while the GPU still executes it.

    Args:
        device: the GPU.
        work: torch's ``Work``, which may know the duration of the backend's kernels.
        begin: an event before the operation.
        call_time: the time at which the host recorded ``begin`` [s].
    """

    def __init__(self, device: Device, work: Any, begin: Any, call_time: float) -> None:
        self.stream, self.seconds, self._device, self._work = device.stream, 0.0, device, work
        self._begin, self._call_time, self._end = begin, call_time, device.event()

    def poll(self) -> float | None:
        """Return the end time on the host's clock [s], or None if the operation has not ended."""
        if not _is_reached(self._end):
            return None
        self.seconds = self._begin.elapsed_time(self._end) / 1e3
        if self._work is not None:
            with suppress(RuntimeError):  # only NCCL knows it, if TORCH_NCCL_ENABLE_TIMING is set
                self.seconds = self._work._get_duration() / 1e3
        return self._device.clock.time(self._begin, self._call_time, self._end, time.monotonic())


def _is_reached(event: Any) -> bool:
    """Return whether the GPU has reached an event; False while queries are not allowed."""
    if not event_query_lock.acquire(blocking=False):
        return False
    try:
        return bool(event.query())
    finally:
        event_query_lock.release()
