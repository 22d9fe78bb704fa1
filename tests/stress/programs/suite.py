"""Programs in the shape of other people's: the same under torchrun and under distkit.

Each file of ``scripts/`` is a program for torchrun, in the style of PyTorch's tutorials and
examples or of a library on top of it. It runs under ``torchrun`` with gloo and, unmodified, on a
cluster, recorded and stepped: every rank prints the same, its communication is in the trace, and
nothing is reported. Programs that seed nothing print other numbers on each rank, in both.
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
from distkit.diagnosis.findings import Kind
from distkit.events import Op, State

SCRIPTS = Path(__file__).with_name("scripts")

#: The limit of a program [s].
PATIENCE = 180.0

#: Trials under torchrun: on a busy machine gloo aborts some processes that end.
ATTEMPTS = 3


@dataclass(frozen=True)
class Program:
    """A script and what to expect of it.

    Args:
        ops: operations that its trace has to hold.
        ranks: the number of ranks.
        arguments: its command line.
        seeded: it prints the same numbers each time.
        needs: the package that it imports.
    """

    ops: str
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    seeded: bool = True
    needs: str = "torch"


#: By the name of the script. What stands behind a name and a colon is a variant of it.
ALL: dict[str, Program] = {
    "tour_of_collectives": Program(
        "all_reduce broadcast reduce all_gather scatter gather reduce_scatter all_to_all barrier"
    ),
    "point_to_point": Program("send recv", ranks=4),
    "receive_from_anybody": Program("send recv", ranks=4),
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
    """What differs from torchrun, recorded and stepped, and what is reported against a program."""
    program, script = ALL[name], SCRIPTS / f"{name.partition(':')[0]}.py"
    expected = under_torchrun(script, program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dk.errors.CommunicationWarning)  # findings are read below
        run = cluster.submit(script, *program.arguments).wait(PATIENCE)
        stepper = cluster.step(script, *program.arguments)
        for _ in range(2):
            if not stepper.finished:
                stepper.next()
        stepped = stepper.finish()
    yield differs(printed(run), expected, program)
    yield from (str(f) for f in run.findings if f.kind is not Kind.STRAGGLER)
    yield unrecorded(run, program)
    yield differs(printed(stepped), expected, program)


def printed(run: Run) -> Printed:
    """All lines of each rank, of both streams."""
    return [text.splitlines() for text in run.output]


def under_torchrun(script: Path, program: Program) -> Printed:
    """What each rank prints to its standard output under torchrun.

    Raises:
        RuntimeError: it fails there, too.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options = ["--standalone", f"--nproc-per-node={program.ranks}", "--redirects=1"]
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as logs:
            run = [sys.executable, "-m", "torch.distributed.run", *options, f"--log-dir={logs}"]
            ran = subprocess.run(
                [*run, str(script), *program.arguments],
                env=environ,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            if ran.returncode == 0:
                files = sorted(Path(logs).rglob("stdout.log"), key=lambda f: int(f.parent.name))
                return [file.read_text().splitlines() for file in files]
    raise RuntimeError(f"{script.name} fails under torchrun:\n{ran.stderr[-3000:]}")


def differs(ours: Printed, expected: Printed, program: Program) -> str:
    """How the output differs; lines that torchrun does not know are from the other stream."""
    if not program.seeded:
        if any(len({*map(str, lines)}) < program.ranks for lines in (ours, expected)):
            return "ranks print the same"
        ours, expected = _words(ours), _words(expected)
    for rank, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        known = [line for line in mine if line in theirs]
        if known != theirs:
            return f"rank {rank} prints {mine}, not {theirs}"
    return ""


def _words(lines: Printed) -> Printed:
    return [[re.sub(r"-?\d+\.\d+(e-?\d+)?", "#", line) for line in rank] for rank in lines]


def unrecorded(run: Run, program: Program) -> str:
    """What is missing in the trace."""
    spans = run.trace.spans
    open_ = [str(span.op) for span in spans if span.state is not State.COMPLETED]
    missing = {Op(op) for op in program.ops.split()} - {span.op for span in spans}
    silent = {*run.ranks} - {span.rank for span in spans}
    return (
        f"not completed: {open_}, missing: {missing}, {silent}"
        if open_ or missing or silent
        else ""
    )
