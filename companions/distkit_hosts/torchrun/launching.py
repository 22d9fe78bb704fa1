"""Run torchrun, srun or mpiexec so that each rank is recorded.

The launcher's command is unchanged, except that each rank starts with
:mod:`distkit_hosts.torchrun.attach`.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from distkit.cluster.processes.descendants import die_with_parent
from distkit.errors import StartError

#: Launchers other than torchrun; the Python that they start follows their own options.
_OTHERS = {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prun"}
_PYTHON = re.compile(r"python[\d.]*t?")
_TORCHRUN = "torch.distributed.run", "torch.distributed.launch"

#: Options of Python that have a value.
_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}

#: Signals passed on to the launcher.
_PASSED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def is_launcher(command: Sequence[str]) -> bool:
    """Return whether a command starts ranks by itself.

    >>> is_launcher(["torchrun", "train.py"]), is_launcher(["train.py"])
    (True, False)
    """
    name = Path(command[0]).name
    return name == "torchrun" or name in _OTHERS or _PYTHON.fullmatch(name) is not None


def recorded(command: Sequence[str], folder: str | Path) -> list[str]:
    """Return the command that starts the same ranks, recorded.

    Args:
        command: the command of torchrun, or of another launcher that starts Python.
        folder: the folder for the files of the ranks.

    Raises:
        StartError: the command starts no Python script.

    >>> recorded(["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], "f")[3:]
    ['-m', 'distkit_hosts.torchrun.attach', 'f', 'train.py', '--lr', '1']
    >>> recorded(["srun", "-n", "2", "python", "-u", "train.py"], "f")[3:]
    ['python', '-u', '-m', 'distkit_hosts.torchrun.attach', 'f', 'train.py']
    """
    attach = ["-m", "distkit_hosts.torchrun.attach", str(folder)]
    for at, word in enumerate(command, 1):
        before, after, name = [*command[:at]], [*command[at:]], Path(word).name
        if name == "torchrun":
            return before + _of_torchrun(after, attach)
        if _PYTHON.fullmatch(name):
            return before + _of_python(after, attach)
    raise _refused("there is no Python in it")


def _of_torchrun(words: list[str], attach: list[str]) -> list[str]:
    from torch.distributed.run import get_args_parser  # on first use: it imports torch

    try:
        args = get_args_parser().parse_args(words)
    except SystemExit:  # the parser has printed the error
        raise _refused("torchrun cannot read it") from None
    if args.no_python or args.run_path:
        raise _refused("with --no-python or --run-path torchrun starts no script or module")
    at = len(words) - len(args.training_script_args) - 1
    options = words[:at] if args.module else [*words[:at], "-m"]
    module = ["-m"] if args.module else []
    return [*options, *attach[1:], *module, *words[at:]]


def _of_python(words: list[str], attach: list[str]) -> list[str]:
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 1 + (words[at] in _WITH_VALUE)
    options, rest = words[:at], words[at:]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN:
        return [*options, *rest[:2], *_of_torchrun(rest[2:], attach)]
    if rest[:1] == ["-m"] or (rest and not rest[0].startswith("-")):
        return [*options, *attach, *rest]
    raise _refused("Python is given no script")


def _refused(why: str) -> StartError:
    return StartError(
        f"this command cannot be recorded: {why}. Give the script as for the launcher: "
        "distkit trace -- torchrun --nproc-per-node 2 train.py"
    )


def run(command: Sequence[str], on_signal: Callable[[], object]) -> int:
    """Run a launcher to its end, and return its exit status as a shell does.

    It runs in a session of its own, so that each signal reaches it once, from this process.

    Args:
        command: the launcher with its arguments.
        on_signal: called once after the first signal has been passed on.

    Raises:
        StartError: there is no such launcher.
    """
    try:
        process = subprocess.Popen(
            command, start_new_session=True, preexec_fn=partial(die_with_parent, signal.SIGTERM)
        )
    except OSError as error:
        raise StartError(f"{command[0]} cannot be started ({error.strerror}).") from error
    told = list[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)
        told.append(number)
        if len(told) == 1:
            on_signal()

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
