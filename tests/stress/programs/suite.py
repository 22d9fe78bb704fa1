"""Typical programs behave the same under torchrun and distkit.

Each file of ``scripts/`` is a program for torchrun, in the style of PyTorch's tutorials and
examples or of a library based on PyTorch. It runs under ``torchrun`` with gloo and, unmodified, on
a cluster, once recorded and once stepped. Each rank must print the same output as under
``torchrun``, its communication must be in the trace, and nothing may be reported. Programs without
seeds must print different numbers on each rank, under torchrun and under distkit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, State

SCRIPTS = Path(__file__).with_name("scripts")

#: Timeout of a program [s].
TIMEOUT = 180.0

#: Attempts under torchrun: on a busy machine, gloo aborts some processes when they end.
ATTEMPTS = 3


@dataclass(frozen=True)
class Program:
    """A script and its expected behavior.

    Args:
        ops: the operations that its trace must contain.
        ranks: the number of ranks.
        arguments: its command-line arguments.
        seeded: whether the program prints the same numbers in every run.
        needs: the package that it imports.
    """

    ops: str
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    seeded: bool = True
    needs: str = "torch"


#: The programs by script; a colon and the name of a variant may follow.
ALL: dict[str, Program] = {
    "tour_of_collectives": Program(
        "all_reduce broadcast reduce all_gather scatter gather reduce_scatter all_to_all barrier"
    ),
    "point_to_point": Program("send recv", ranks=4),
    "receive_from_any_source": Program("send recv", ranks=4),
    "ring_by_hand": Program("send recv all_reduce", ranks=4),
    "average_gradients": Program("all_reduce"),
    "ddp_basic": Program("all_reduce"),
    "elastic_ddp": Program("all_reduce", seeded=False),
    "forgotten_broadcast": Program("barrier", seeded=False),
    "ddp_sampler": Program("all_reduce"),
    "ddp_no_sync": Program("all_reduce"),
    "ddp_unused": Program("all_reduce"),
    "ddp_sparse": Program("all_reduce"),
    "ddp_checkpoint": Program("all_reduce barrier"),
    "uneven_join": Program("all_reduce broadcast"),
    "zero_redundancy": Program("all_reduce broadcast"),
    "comm_hooks": Program("all_reduce"),
    "local_sgd": Program("all_reduce"),
    "fsdp2": Program("all_gather reduce_scatter"),
    "hsdp": Program("all_gather reduce_scatter all_reduce", ranks=4),
    "dtensor": Program("all_gather all_reduce"),
    "tensor_parallel": Program("all_reduce"),
    "sequence_parallel": Program("all_gather all_reduce"),
    "two_dimensions": Program("all_gather reduce_scatter all_reduce", ranks=4),
    "pipeline_schedules": Program("send recv broadcast"),
    "three_dimensions": Program("all_reduce", arguments=("--dp=2",)),
    "three_dimensions:tp": Program("all_reduce", arguments=("--tp=2",)),
    "three_dimensions:pp": Program("send recv all_reduce", arguments=("--pp=2",)),
    "three_dimensions:dp,tp": Program("all_reduce", ranks=4, arguments=("--dp=2", "--tp=2")),
    "three_dimensions:dp,pp": Program("send recv", ranks=4, arguments=("--dp=2", "--pp=2")),
    "three_dimensions:tp,pp": Program("send recv", ranks=4, arguments=("--tp=2", "--pp=2")),
    "three_dimensions:all": Program(
        "send recv all_reduce", ranks=8, arguments=("--dp=2", "--tp=2", "--pp=2")
    ),
    "checkpoint": Program("all_gather reduce_scatter barrier"),
    "process_groups": Program("all_reduce broadcast all_gather", ranks=4),
    "objects": Program("broadcast all_gather gather scatter"),
    "expert_parallel": Program("all_to_all"),
    "functional": Program("all_reduce all_gather reduce_scatter broadcast"),
    "evaluation": Program("all_reduce"),
    "store": Program("barrier"),
    "environment": Program("barrier", arguments=("--name", "x", "3")),
    "preprocessing": Program("all_reduce"),
    "threads": Program("all_reduce"),
    "accelerated": Program("all_reduce", needs="accelerate"),
    "lightning_fabric": Program("all_reduce", needs="lightning"),
    "lightning_trainer": Program("all_reduce", needs="lightning"),
    "hf_trainer": Program("all_reduce", needs="transformers"),
    "ignite_engine": Program("all_reduce", needs="ignite"),
    "torch_metrics": Program("all_gather", needs="torchmetrics"),
    "fairscale_oss": Program("broadcast reduce", needs="fairscale"),
}

#: The lines that each rank printed.
Printed = list[list[str]]


def faults(name: str, cluster: dk.Cluster) -> Iterator[str]:
    """Generate the differences from torchrun, recorded and stepped, and the findings."""
    program, script = ALL[name], SCRIPTS / f"{name.partition(':')[0]}.py"
    expected = under_torchrun(script, program)
    with warnings.catch_warnings():
        # the findings are checked below
        warnings.simplefilter("ignore", dk.errors.CommunicationWarning)
        run = cluster.submit(script, *program.arguments).wait(TIMEOUT)
        stepper = cluster.step(script, *program.arguments)
        for _ in range(2):
            if not stepper.finished:
                stepper.next()
        stepped = stepper.finish()
    yield output_difference(printed(run), expected, program)
    yield from (str(f) for f in run.findings if f.kind != "straggler")
    yield missing_from_trace(run, program)
    yield output_difference(printed(stepped), expected, program)


def printed(run: Run) -> Printed:
    """Return the lines that each rank printed to both streams."""
    return [text.splitlines() for text in run.output]


def under_torchrun(script: Path, program: Program) -> Printed:
    """Return the standard output of each rank under torchrun.

    Raises:
        RuntimeError: the program fails under torchrun.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options = ["--standalone", f"--nproc-per-node={program.ranks}", "--redirects=1"]
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as logs:
            run = [sys.executable, "-m", "torch.distributed.run", *options, f"--log-dir={logs}"]
            completed = subprocess.run(
                [*run, str(script), *program.arguments],
                env=environ,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            if completed.returncode == 0:
                files = sorted(Path(logs).rglob("stdout.log"), key=lambda f: int(f.parent.name))
                return [file.read_text().splitlines() for file in files]
    raise RuntimeError(f"{script.name} fails under torchrun:\n{completed.stderr[-3000:]}")


def output_difference(ours: Printed, expected: Printed, program: Program) -> str:
    """Return the difference in output; ``ours`` may have more lines, since it includes stderr."""
    if not program.seeded:
        if any(len({*map(str, lines)}) < program.ranks for lines in (ours, expected)):
            return "all ranks print the same output"
        ours, expected = _without_numbers(ours), _without_numbers(expected)
    for rank, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        shared = [line for line in mine if line in theirs]
        if shared != theirs:
            return f"rank {rank} prints {mine}, not {theirs}"
    return ""


def _without_numbers(lines: Printed) -> Printed:
    return [[re.sub(r"-?\d+\.\d+(e-?\d+)?", "#", line) for line in rank] for rank in lines]


def missing_from_trace(run: Run, program: Program) -> str:
    """Return the operations and ranks that are missing from the trace."""
    spans = run.trace.spans
    incomplete = [str(span.op) for span in spans if span.state is not State.COMPLETED]
    missing = {Op(op) for op in program.ops.split()} - {span.op for span in spans}
    silent = {*run.ranks} - {span.rank for span in spans}
    return (
        f"not completed: {incomplete}, missing: {missing}, {silent}"
        if incomplete or missing or silent
        else ""
    )
