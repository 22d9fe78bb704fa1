"""What a GPU does, and when, without waiting for it.

A call puts work into a *stream* of the GPU and returns. So the tap puts *events* into the stream,
before and after the work, and asks later whether the GPU has come there. Values are summarized on
the GPU, in the same stream; the numbers go to host memory while the program goes on.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from distkit.recording.plain import Values

#: Held while the GPU is asked. A capture of a CUDA graph holds it until its end: it would fail if
#: another thread asked the GPU for anything.
asking = threading.Lock()


class Device:
    """A GPU, as torch's module for its kind knows it."""

    def __init__(self, device: torch.device) -> None:
        self._torch, self._device = torch.get_device_module(device), device
        self.clock = Clock()

    @property
    def stream(self) -> int:
        """The number of this thread's current stream."""
        return int(self._torch.current_stream(self._device).stream_id)

    @property
    def facts(self) -> tuple[tuple[str, Any], ...]:
        """Attributes of a call that is made now."""
        return ("device", str(self._device)), ("stream", self.stream)

    @property
    def memory(self) -> int:
        """The bytes that tensors of this process have there."""
        return int(self._torch.memory_allocated(self._device))

    def event(self) -> Any:
        """An event behind all that is in this thread's current stream."""
        event = self._torch.Event(enable_timing=True)
        self._torch.current_stream(self._device).record_event(event)
        return event

    def wait_for(self, event: Any) -> None:
        """Have what this thread puts into its stream from now on come after an event."""
        self._torch.current_stream(self._device).wait_event(event)

    def captures(self) -> bool:
        """True if this thread's calls go into a CUDA graph, and nothing happens yet."""
        return bool(self._torch.is_current_stream_capturing())


device_of = cache(Device)


class Later:
    """A summary of values that are on their way from the GPU.

    Args:
        flat: what to summarize, (k,), float64.
        stride: every how many of these are shown.
        size: of the whole tensor, of which ``flat`` may be a sample.
    """

    def __init__(self, flat: torch.Tensor, stride: int, size: int) -> None:
        device = device_of(flat.device)
        self.memory, self._size, self._sampled = device.memory, size, size > len(flat)
        square = flat.square().sum() * (size / len(flat))  # dot would load cuBLAS
        numbers = torch.cat([flat[::stride], torch.stack([square, flat.min(), flat.max()])])
        self._numbers = torch.empty(
            numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda
        ).copy_(numbers, non_blocking=True)
        self._event = device.event()

    def take(self) -> Values | None:
        """Summary's fields, as those that ``summarize`` returns; None if not yet."""
        if not _has_come(self._event):
            return None
        *values, square, least, most = self._numbers.tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        return tuple(values), norm, least, most, self._size, self._sampled


class Clock:
    """The time of a device's events on the host's clock.

    The GPU comes to an event after the host has put it there, and before the host sees that: each
    bounds how far the two clocks are apart, and one that an idle GPU came to at once is exact.

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
        self._latest: Any = None  # event, at …
        self._at = 0.0  # [s] on the device's clock
        self._ahead = -math.inf  # the host's clock, of that one

    def time(self, begin: Any, called: float, end: Any, seen: float) -> float:
        """When ``end`` was, on the host's clock [s].

        Args:
            begin: an event before it, which the host has put there at ``called`` [s].
            called: on the host's clock.
            end: the GPU has come to it.
            seen: when the host saw that [s].
        """
        since = self._latest.elapsed_time(begin) / 1e3 if self._latest is not None else 0.0
        self._latest, self._at = begin, self._at + since
        ended = self._at + begin.elapsed_time(end) / 1e3
        self._ahead = min(max(self._ahead, called - self._at), seen - ended)
        return max(called, float(ended + self._ahead))


class Flight:
    """An operation that its caller has waited for, and that the GPU is still at.

    Args:
        device: where.
        work: torch's, which may know how long the backend's own kernels took.
        begin: an event before the operation, which the host has put there at ``called`` [s].
        called: on the host's clock.
    """

    def __init__(self, device: Device, work: Any, begin: Any, called: float) -> None:
        self.stream, self.seconds, self._device, self._work = device.stream, 0.0, device, work
        self._begin, self._called, self._end = begin, called, device.event()

    def joins(self) -> None:
        """This thread's current stream waits until it is over, and its values are read."""
        self._device.wait_for(self._end)
        self.stream = self._device.stream

    def landed(self) -> float | None:
        """When it was over, on the host's clock [s]; None if it is not."""
        if not _has_come(self._end):
            return None
        self.seconds = self._begin.elapsed_time(self._end) / 1e3
        if self._work is not None:
            with suppress(RuntimeError):  # only NCCL knows, if TORCH_NCCL_ENABLE_TIMING is set
                self.seconds = self._work._get_duration() / 1e3
        return self._device.clock.time(self._begin, self._called, self._end, time.monotonic())


def _has_come(event: Any) -> bool:
    """True if the GPU has come to an event, and may be asked."""
    if not asking.acquire(blocking=False):
        return False
    try:
        return bool(event.query())
    finally:
        asking.release()
