"""Recording of calls that return before the GPU has finished, on a fake device.

The device executes when the test allows it. The list of operators shows that the recorder never
waits: none copies values to the host synchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run

#: Operators that wait for a GPU; copies wait unless they are non-blocking.
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "a copy that waits"}


def on_device(fn: Callable[..., Any], *args: Any) -> Run:
    """Run ``fn(standin, group, *args)`` on two ranks with an asynchronous backend."""

    def program() -> Any:
        import standin

        standin.install()
        standin.register_async_backend()
        return fn(standin, dist.new_group(backend="cpu:gloo,pretend:gloo"), *args)

    return dk.run_ranks(program, 2)


def test_call_ends_with_the_device_and_recording_does_not_wait() -> None:
    def program(standin: Any, group: Any) -> tuple[list[str], float]:
        from distkit.recording.recorder import current

        x, recorder = torch.arange(4.0).to("pretend"), current()
        assert recorder is not None
        recorder._cpu_time = -60.0  # the fake device is slow: summarize all values
        dist.all_reduce(x, group=group)
        stopped = time.monotonic()
        standin.stop()
        standin.operators.clear()
        dist.all_reduce(x, group=group)
        recorder.poll()
        assert [p.is_done for p in recorder.in_flight][-1:] == [False]
        operators, paused = list(standin.operators), time.monotonic() - stopped
        standin.go()
        return operators, paused

    run = on_device(program)
    for rank, (operators, paused) in enumerate(run.results):
        assert operators
        assert not {*operators} & WAITING
        first, second = [s for s in run.trace.spans if s.op == "all_reduce" and s.rank == rank]
        assert second.after is not None and second.after.values == (0.0, 1.0, 2.0, 3.0)
        assert second.after.norm == pytest.approx(14**0.5)
        assert second.before is None or second.before.max == 3.0  # it arrived in time
        assert first.end is not None and second.end is not None
        assert second.end - first.end >= paused
        attributes = dict(second.attributes)
        assert attributes.pop("device_seconds") >= 0
        assert attributes == {"device": "pretend:0", "stream": 0, "memory": 4096}


def test_thread_that_waits_for_a_hung_device_is_reported() -> None:
    def program(standin: Any, group: Any) -> None:
        x = torch.ones(4).to("pretend")
        standin.stop()  # like an NCCL kernel without the other rank
        if dist.get_rank() == 0:
            dist.all_reduce(x, group=group)
            x.sum().item()
        else:
            dist.recv(torch.ones(1), 0)

    with pytest.raises(dk.errors.DeadlockError, match=r"all_reduce") as caught:
        on_device(program)
    assert "recv" in str(caught.value)


def test_captured_calls_are_marked_as_captured() -> None:
    def program(standin: Any, group: Any) -> None:
        x = torch.ones(4).to("pretend")
        with standin.capture():  # which fails if the device is queried
            dist.all_reduce(x, group=group)

    spans = [s for s in on_device(program).trace.spans if s.op == "all_reduce"]
    assert len(spans) == 2
    assert all(s.attributes["captured"] and s.before is s.after is None for s in spans)
