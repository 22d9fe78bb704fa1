"""Commands of launchers, with the recorder inserted before their script."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from distkit.errors import StartError
from distkit_hosts.torchrun import launching
from distkit_hosts.torchrun.launching import is_launcher, with_recorder

RECORDER = "-m distkit_hosts.torchrun.attached f"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun train.py", f"torchrun {RECORDER} train.py"),
        ("torchrun --standalone t.py -m x", f"torchrun --standalone {RECORDER} t.py -m x"),
        (
            "/venv/bin/torchrun --nnodes=1:3 --nproc_per_node 2 -t3 -r 1 --rdzv-id j t.py --out o",
            "/venv/bin/torchrun --nnodes=1:3 --nproc_per_node 2 -t3 -r 1 --rdzv-id j "
            f"{RECORDER} t.py --out o",
        ),
        ("torchrun -m pkg.train a", "torchrun -m distkit_hosts.torchrun.attached f -m pkg.train a"),
        (
            "python3.11 -u -m torch.distributed.run --nproc-per-node=2 t.py",
            f"python3.11 -u -m torch.distributed.run --nproc-per-node=2 {RECORDER} t.py",
        ),
        ("srun -n 4 python -X dev t.py a", f"srun -n 4 python -X dev {RECORDER} t.py a"),
        ("srun -N 2 torchrun --nnodes 2 t.py", f"srun -N 2 torchrun --nnodes 2 {RECORDER} t.py"),
        ("mpiexec -n 2 python -m pkg.train", f"mpiexec -n 2 python {RECORDER} -m pkg.train"),
    ],
)
def test_recorder_is_inserted_before_the_script(command: str, expected: str) -> None:
    assert is_launcher(command.split())
    assert with_recorder(command.split(), "f") == expected.split()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("torchrun --nproc-per-node 2", "torchrun cannot parse it"),
        ("torchrun --no-python ./a.out", "with --no-python or --run-path"),
        ("srun -n 2 ./a.out", "it does not start Python"),
        ("mpirun python -c print()", "it does not run a Python script or module"),
    ],
)
def test_commands_without_a_python_script_raise(command: str, reason: str) -> None:
    with pytest.raises(StartError, match=f"cannot be recorded: {reason}"):
        with_recorder(command.split(), "f")


def test_torchrun_parses_a_recorded_command() -> None:
    """torchrun's own parser finds its options, and passes the script on to the recorder."""
    command = "torchrun --standalone --nproc-per-node 2 t.py --lr 1".split()
    options = get_args_parser().parse_args(with_recorder(command, "f")[1:])
    assert (options.standalone, options.nproc_per_node, options.module) == (True, "2", True)
    assert options.training_script == "distkit_hosts.torchrun.attached"
    assert options.training_script_args == ["f", "t.py", "--lr", "1"]


# -- running a launcher --------------------------------------------------------------------------

LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def test_signal_is_forwarded_once_and_status_is_the_launchers() -> None:
    calls: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    status = launching.run([sys.executable, "-c", LAUNCHER], lambda: calls.append(1))
    assert (status, calls) == (7, [1])
    assert signal.getsignal(signal.SIGTERM) is before


def test_missing_launcher_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nosuchrun cannot be started"):
        launching.run([str(tmp_path / "nosuchrun")], print)
