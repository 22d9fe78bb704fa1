"""Run torchrun, srun or mpiexec, and record each rank.

The launcher's command is unchanged, except that each rank starts with
:mod:`distkit_hosts.torchrun.attached`.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from distkit.cluster.processes.cleanup import die_with_parent
from distkit.errors import StartError

#: Launchers other than torchrun; Python follows their own options in the command.
_OTHER_LAUNCHERS = {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prun"}
_PYTHON = re.compile(r"python[\d.]*t?")
_TORCHRUN = "torch.distributed.run", "torch.distributed.launch"

#: Options of Python that take a value.
_VALUE_OPTIONS = {"-W", "-X", "--check-hash-based-pycs"}

#: Signals forwarded to the launcher.
_FORWARDED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def is_launcher(command: Sequence[str]) -> bool:
    """Return whether a command may launch ranks: torchrun, another launcher, or Python.

    >>> is_launcher(["torchrun", "train.py"]), is_launcher(["train.py"])
    (True, False)
    """
    name = Path(command[0]).name
    return name == "torchrun" or name in _OTHER_LAUNCHERS or _PYTHON.fullmatch(name) is not None


def with_recorder(command: Sequence[str], folder: str | Path) -> list[str]:
    """Return the command that starts the same ranks with the recorder.

    Args:
        command: the command of torchrun, or of another launcher that starts Python.
        folder: the folder for the files of the ranks.

    Raises:
        StartError: the command does not start a Python script or module.

    >>> with_recorder(["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], "f")[3:]
    ['-m', 'distkit_hosts.torchrun.attached', 'f', 'train.py', '--lr', '1']
    >>> with_recorder(["srun", "-n", "2", "python", "-u", "train.py"], "f")[3:]
    ['python', '-u', '-m', 'distkit_hosts.torchrun.attached', 'f', 'train.py']
    """
    attach = ["-m", "distkit_hosts.torchrun.attached", str(folder)]
    for index, word in enumerate(command, 1):
        prefix, arguments, name = [*command[:index]], [*command[index:]], Path(word).name
        if name == "torchrun":
            return prefix + _record_torchrun(arguments, attach)
        if _PYTHON.fullmatch(name):
            return prefix + _record_python(arguments, attach)
    raise _recording_error("it does not start Python")


def _record_torchrun(arguments: list[str], attach: list[str]) -> list[str]:
    from torch.distributed.run import get_args_parser  # on first use: it imports torch

    try:
        args = get_args_parser().parse_args(arguments)
    except SystemExit:  # the parser has printed the error
        raise _recording_error("torchrun cannot parse it") from None
    if args.no_python or args.run_path:
        raise _recording_error(
            "with --no-python or --run-path, torchrun starts neither a script nor a module"
        )
    index = len(arguments) - len(args.training_script_args) - 1
    options = arguments[:index] if args.module else [*arguments[:index], "-m"]
    module = ["-m"] if args.module else []
    return [*options, *attach[1:], *module, *arguments[index:]]


def _record_python(arguments: list[str], attach: list[str]) -> list[str]:
    index, stop = 0, ("-m", "-c", "-")
    while index < len(arguments) and (arg := arguments[index]).startswith("-") and arg not in stop:
        index += 1 + (arg in _VALUE_OPTIONS)
    options, script = arguments[:index], arguments[index:]
    if script[:1] == ["-m"] and script[1:2] and script[1] in _TORCHRUN:
        return [*options, *script[:2], *_record_torchrun(script[2:], attach)]
    if script[:1] == ["-m"] or (script and not script[0].startswith("-")):
        return [*options, *attach, *script]
    raise _recording_error("it does not run a Python script or module")


def _recording_error(reason: str) -> StartError:
    return StartError(
        f"this command cannot be recorded: {reason}. Pass the complete command of the launcher: "
        "distkit trace -- torchrun --nproc-per-node 2 train.py"
    )


def run(command: Sequence[str], on_signal: Callable[[], object]) -> int:
    """Run a launcher and return its exit status as a shell reports it.

    The launcher runs in a separate session, so that each signal reaches it once, from this process.

    Args:
        command: the launcher with its arguments.
        on_signal: called once, after the first signal has been forwarded.

    Raises:
        StartError: the launcher cannot be started.
    """
    try:
        process = subprocess.Popen(
            command, start_new_session=True, preexec_fn=partial(die_with_parent, signal.SIGTERM)
        )
    except OSError as error:
        raise StartError(f"{command[0]} cannot be started ({error.strerror}).") from error
    signals = list[int]()

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)
        signals.append(number)
        if len(signals) == 1:
            on_signal()

    handlers = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        status = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
