"""Programs in the shape of other people's: the same under torchrun and under distkit.

Each file of ``benchmarks/scripts`` is a program for torchrun, in the style of PyTorch's tutorials
and examples or of a library on top of it. It runs under ``torchrun`` with gloo and, unmodified, on
a cluster, recorded and stepped: every rank prints the same, its communication is in the trace, and
nothing is said against it. Programs that seed nothing print other numbers on each rank, in both.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figure import Figure, figure
from distkit.diagnosis.findings import Kind
from distkit.errors import DistkitError, RunError
from distkit.events import Op, State

if TYPE_CHECKING:
    from distkit.cluster.cluster import Cluster
    from distkit.cluster.runs.run import Run

SCRIPTS = Path(__file__).with_name("scripts")

#: A program may take so long [s], and fail so often under torchrun: on a busy machine gloo aborts
#: some processes that end.
PATIENCE, ATTEMPTS = 180.0, 3


@dataclass(frozen=True)
class Program:
    """A script: on how many ranks, what its trace has to hold, and what has to be installed."""

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

#: What a rank printed to its standard output, by rank.
Printed = list[list[str]]


@dataclass
class Outcome:
    """How a program went: what is wrong with it, by what was looked at."""

    name: str
    wrong: dict[str, str] = field(default_factory=dict)
    torchrun: float = 0.0  # [s]
    distkit: float = 0.0  # [s]
    events: int = 0

    def __str__(self) -> str:
        verdict = "; ".join(f"{what}: {why}" for what, why in self.wrong.items()) or "the same"
        times = f"{self.torchrun:6.1f} s {self.distkit:6.2f} s {self.events:6} events"
        return f"{self.name:24} {times}  {verdict}"


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Run every program whose libraries are installed ``reps`` times."""
    from distkit.cluster.cluster import Cluster

    names = [name for name, program in ALL.items() if find_spec(program.needs)]
    clusters: dict[int, Cluster] = {}
    outcomes = []
    try:
        for name in names * reps:
            ranks = ALL[name].ranks
            if ranks not in clusters:
                clusters[ranks] = Cluster(ranks, threads=1)
            outcomes.append(compare(name, clusters[ranks]))
            say(str(outcomes[-1]))
    finally:
        for cluster in clusters.values():
            cluster.stop()
    missing = sorted({p.needs for p in ALL.values()} - {ALL[name].needs for name in names})
    details = {"programs": [vars(o) for o in outcomes], "not installed": missing}
    return _figures(outcomes, len(names)), details


def _figures(outcomes: list[Outcome], count: int) -> list[Figure]:
    def wrong(what: str, name: str, **limits: Any) -> Figure:
        found = [float(sum(what in o.wrong for o in outcomes))]
        return figure(name, "programs", found, absolute=True, **limits)

    ran = [o for o in outcomes if "torchrun" not in o.wrong]
    ratio = figure(
        f"a program under torchrun and on a cluster that is there ({count} programs)",
        "s",
        [o.distkit for o in ran],
        "torchrun",
        [o.torchrun for o in ran],
    )
    return [
        wrong(
            "output",
            f"programs of {count} that print other numbers than under torchrun",
            must=0,
            aim=0,
        ),
        wrong(
            "trace",
            f"programs of {count} whose communication is not, or not all, in the trace",
            must=0,
            aim=0,
        ),
        wrong(
            "stepped",
            f"programs of {count} that print other numbers when they are stepped",
            must=0,
            aim=0,
        ),
        wrong(
            "finding", f"correct programs of {count} that something is said against", must=0, aim=0
        ),
        wrong("torchrun", f"programs of {count} that do not even run under torchrun"),
        wrong("straggler", f"correct programs of {count} one rank of which is called slow"),
        ratio,
    ]


def compare(name: str, cluster: Cluster) -> Outcome:
    """Run one program under torchrun and on a cluster, recorded and stepped."""
    program, outcome = ALL[name], Outcome(name)
    script = SCRIPTS / f"{name.partition(':')[0]}.py"
    began = time.perf_counter()
    try:
        expected = under_torchrun(script, program)
    except (DistkitError, subprocess.TimeoutExpired) as error:
        outcome.wrong["torchrun"] = str(error)[-300:]
        return outcome
    outcome.torchrun = time.perf_counter() - began
    began = time.perf_counter()
    run = cluster.submit(script, *program.arguments)
    printed = _finish(run)
    outcome.distkit = time.perf_counter() - began
    outcome.events = len(run.trace)
    said = {
        "output": _differs(printed, expected, program) or _error(run),
        "trace": _unrecorded(run, program),
        "finding": _findings(run, stragglers=False),
        "straggler": _findings(run, stragglers=True),
        "stepped": _stepped(cluster, script, program, expected),
    }
    outcome.wrong = {what: why for what, why in said.items() if why}
    return outcome


def under_torchrun(script: Path, program: Program) -> Printed:
    """What each rank prints under torchrun.

    Raises:
        DistkitError: it fails there, too.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="distkit-bench-") as logs:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={program.ranks}",
                "--redirects=1",
                f"--log-dir={logs}",
                str(script),
                *program.arguments,
            ]
            ran = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=PATIENCE
            )
            if ran.returncode == 0:
                files = sorted(Path(logs).rglob("stdout.log"), key=lambda f: int(f.parent.name))
                return [file.read_text().splitlines() for file in files]
    raise DistkitError(f"{script.name} fails under torchrun:\n{ran.stderr[-3000:]}")


def _finish(run: Run) -> Printed:
    """Wait for a run, and return what its ranks have printed to their standard outputs."""
    from distkit.cluster.runs.run import poll

    lines = poll(run, PATIENCE)  # what is found is looked at here
    if not run.finished:
        run.interrupt()
        lines += poll(run, 20)
    return [
        [text for r, stream, text in lines if (r, stream) == (rank, "stdout")] for rank in run.ranks
    ]


def _differs(printed: Printed, expected: Printed, program: Program) -> str:
    if not program.seeded:
        alike = [lines for lines in (printed, expected) if len({*map(str, lines)}) < program.ranks]
        return "ranks print the same" if alike else _differs_in_words(printed, expected)
    for rank, (mine, theirs) in enumerate(zip(printed, expected, strict=True)):
        for ours, reference in zip(mine, theirs, strict=False):
            if ours != reference:
                return f"rank {rank} prints {ours!r}, not {reference!r}"
        if len(mine) != len(theirs):
            return f"rank {rank} prints {len(mine)} lines, not {len(theirs)}"
    return ""


def _differs_in_words(printed: Printed, expected: Printed) -> str:
    def words(lines: Printed) -> list[list[str]]:
        return [[re.sub(r"-?\d+\.\d+(e-?\d+)?", "#", line) for line in rank] for rank in lines]

    return "" if words(printed) == words(expected) else "ranks print other words"


def _error(run: Run) -> str:
    return "" if run.error is None else str(run.error).partition("\n")[0]


def _unrecorded(run: Run, program: Program) -> str:
    spans = run.trace.spans
    for rank in run.ranks:
        mine = [span for span in spans if span.rank == rank]
        if unfinished := [span for span in mine if span.state is not State.COMPLETED]:
            return f"{unfinished[0].op} of rank {rank} is not completed"
    missing = {Op(op) for op in program.ops.split()} - {span.op for span in spans}
    return f"no {', '.join(sorted(missing))}" if missing else ""


def _findings(run: Run, *, stragglers: bool) -> str:
    """What is said against a run that ended well: that a rank is slow, or anything else."""
    found = [] if run.error is not None else run.findings
    return "; ".join(str(f) for f in found if (f.kind is Kind.STRAGGLER) == stragglers)


def _stepped(cluster: Cluster, script: Path, program: Program, expected: Printed) -> str:
    """What is different when the program is gone through: two steps, then to its end."""
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()):
        stepper = cluster.step(script, *program.arguments)
        try:
            for _ in range(2):
                if not stepper.finished:
                    stepper.next()
            stepper._lockstep.let_go(stepper.ranks, None)
        except RunError as error:
            return str(error).partition("\n")[0]
        rest = _finish(stepper.run)
    first = [line.partition("] ") for line in shown.getvalue().splitlines()]
    printed = [
        [text for label, _, text in first if label == f"[rank {r}"] + lines
        for r, lines in enumerate(rest)
    ]
    return _differs(printed, expected, program) or _error(stepper.run)
