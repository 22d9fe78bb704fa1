"""Recording of calls that return before the GPU has finished, on a fake device.

The device executes when the test allows it. The list of operators shows that the recorder never
waits: none copies values to the host synchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run
from distkit.recording import device, tap

#: Operators that wait for a GPU; copies do, unless they are non-blocking.
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "a copy that waits"}


def on_device(fn: Callable[..., Any], *args: Any) -> Run:
    """Run ``fn(standin, group, *args)`` on two ranks with an asynchronous backend."""

    def program() -> Any:
        import standin

        standin.install()
        standin.in_streams()
        return fn(standin, dist.new_group(backend="cpu:gloo,pretend:gloo"), *args)

    return dk.run_ranks(program, 2)


class Sums(torch.autograd.Function):
    """A function whose backward pass runs on autograd's thread for the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[..., Any]) -> torch.Tensor:
        ctx.call = backward
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.call(gradient), None


def test_call_ends_with_the_device_and_recording_does_not_wait() -> None:
    def program(standin: Any, group: Any) -> tuple[list[str], float]:
        from distkit.recording.recorder import current

        x, recorder = torch.arange(4.0).to("pretend"), current()
        assert recorder is not None
        recorder._cpu_time = -60.0  # the fake device is slow: summarize all values
        dist.all_reduce(x, group=group)
        stopped = time.monotonic()
        standin.stop()
        standin.heard.clear()
        dist.all_reduce(x, group=group)
        recorder.poll()
        assert [p.done for p in recorder.in_flight][-1:] == [False]
        heard, still = list(standin.heard), time.monotonic() - stopped
        standin.go()
        return heard, still

    run = on_device(program)
    for rank, (heard, still) in enumerate(run.results):
        assert heard
        assert not {*heard} & WAITING
        first, second = [s for s in run.trace.spans if s.op == "all_reduce" and s.rank == rank]
        assert second.after is not None and second.after.values == (0.0, 1.0, 2.0, 3.0)
        assert second.after.norm == pytest.approx(14**0.5)
        assert second.before is None or second.before.max == 3.0  # it arrived in time
        assert first.end is not None and second.end is not None
        assert second.end - first.end >= still
        facts = dict(second.attributes)
        assert facts.pop("device_seconds") >= 0
        assert facts == {"device": "pretend:0", "stream": 0, "memory": 4096}


def numbers() -> list[torch.Tensor]:
    """Host tensors, and numbers that torch converts to their dtypes."""
    x = torch.arange(3, dtype=torch.float64)
    return [torch.arange(3.0) + 2, x * 0.1, x + 3, torch.arange(3) == 1, x.float() * 2j]


def test_values_are_converted_in_another_thread() -> None:
    for found in on_device(lambda *_: numbers()).results:
        for have, want in zip(found, numbers(), strict=True):
            assert have.dtype == want.dtype and torch.equal(have, want)


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


def test_backward_pass_that_waits_for_a_hung_device_is_reported() -> None:
    def program(standin: Any, group: Any) -> None:
        def reduces(gradient: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(gradient, group=group)
            return gradient * gradient.item()

        x = torch.ones((), requires_grad=True)
        loss = Sums.apply(x.to("pretend"), reduces)
        standin.stop()
        loss.backward() if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    with pytest.raises(dk.errors.DeadlockError, match=r"all_reduce") as caught:
        on_device(program)
    assert "recv" in str(caught.value)


def test_values_are_read_unless_the_program_may_change_them() -> None:
    def program(standin: Any, group: Any) -> None:
        from distkit.recording.recorder import current

        xs, recorder = [torch.ones(4).to("pretend") for _ in range(2)], current()
        assert recorder is not None
        recorder._cpu_time = -60.0
        works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
        works[0].wait()
        works[1].get_future().wait()

    run = on_device(program)
    for rank in range(2):
        read, given = [s for s in run.trace.spans if s.op == "all_reduce" and s.rank == rank]
        assert read.after is not None
        assert given.end is not None and given.after is None


def test_buckets_are_read_after_the_reducer_has_waited() -> None:
    def program(standin: Any, group: Any) -> list[list[bool]]:
        from distkit.recording.recorder import current

        recorder, seen = current(), []
        assert recorder is not None
        recorder._cpu_time = -60.0

        def sees(gradient: torch.Tensor) -> torch.Tensor:
            """Read after the last bucket is sent and before the reducer waits."""
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(
                lambda: seen.append([p.in_flight is None for _, p in tap.tap._sent_in_backward])
            )
            return gradient.expand(2, 64)

        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to("pretend")
        model = torch.nn.parallel.DistributedDataParallel(
            layers, process_group=group, bucket_cap_mb=0.01, init_sync=False
        )
        for _ in range(2):  # torch has one bucket in the first step
            Sums.apply(model(torch.ones(2, 64).to("pretend")), sees).backward()
        return seen

    run = on_device(program)
    for first, second in run.results:
        assert first == [True]
        assert len(second) > 1 and all(second)
    spans = [s for s in run.trace.spans if s.op == "all_reduce"]
    assert len(spans) == sum(len(seen) for result in run.results for seen in result)
    assert all(s.after is not None for s in spans)


def test_graph_capture_blocks_queries_of_other_threads() -> None:
    class Come:
        def query(self) -> bool:
            return True

    begin, end = partial(tap._capture_begin, lambda: None), partial(tap._capture_end, lambda: None)
    begin()
    assert not device._is_reached(Come())
    end()
    assert device._is_reached(Come())
    end()  # it had not started
    assert device._is_reached(Come())


def test_captured_calls_are_marked_as_captured() -> None:
    def program(standin: Any, group: Any) -> None:
        x = torch.ones(4).to("pretend")
        with standin.capture():  # which fails if the device is queried
            dist.all_reduce(x, group=group)

    run = on_device(program)
    spans = [s for s in run.trace.spans if s.op == "all_reduce"]
    assert len(spans) == 2
    assert all(s.attributes["captured"] and s.before is s.after is None for s in spans)
