"""NVIDIA's Multi-Process Service: one daemon a GPU, in the cluster's private folder.

Its parent is a fork of the zygote, so it ends with the cluster however that ends: what is not
killed with its group is adopted, and ended, by the zygote or the reaper.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit.errors import StartError

#: The daemon answers within this time [s], and is asked so often [s].
READY, AGAIN = 10.0, 0.05

#: The longest path of a socket [bytes], and the longest name of the daemon's.
_LONGEST, _SOCKET = 107, "/control_privileged"


def serve(lifeline: Channel, folder: str, control: str, uuid: str, environ: dict[str, str]) -> None:
    """Be the parent of the daemon of one GPU: say why it does not answer, or "" when it does.

    Args:
        lifeline: breaks when the cluster ends, and ends this process with the daemon.
        folder: of the cluster.
        control: the program ``nvidia-cuda-mps-control``.
        uuid: of the GPU.
        environ: where the daemon meets its clients.
    """
    from distkit.cluster.processes.roles import _end_with

    _end_with(lifeline)
    place = environ["CUDA_MPS_PIPE_DIRECTORY"]
    if len(os.fsencode(place + _SOCKET)) > _LONGEST:
        lifeline.send(f"its folder's path is too long for sockets ({place}): set a shorter TMPDIR")
        return
    Path(place).mkdir(0o700)
    around = {**os.environ, **environ, "CUDA_VISIBLE_DEVICES": uuid}
    with subprocess.Popen([control, "-f"], env=around, stdin=subprocess.DEVNULL) as daemon:
        lifeline.send(_await(daemon, control, around))
        sys.exit(daemon.wait())


def _await(daemon: subprocess.Popen[Any], control: str, environ: Mapping[str, str]) -> str:
    end = time.monotonic() + READY
    why = ""
    while time.monotonic() < end and daemon.poll() is None:
        try:
            ask("get_server_list", control, environ)
            return ""
        except StartError as error:
            why = str(error)
            time.sleep(AGAIN)
    how = f"exit status {daemon.returncode}" if daemon.returncode is not None else why
    return f"its daemon does not answer ({how}){last_words(environ)}"


def ask(what: str, control: str, environ: Mapping[str, str]) -> list[str]:
    """The words of a daemon's answer.

    Raises:
        StartError: it does not answer.
    """
    try:
        command = [control]
        ran = subprocess.run(
            command, input=what + "\n", env=environ, capture_output=True, text=True, timeout=READY
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{Path(control).name}: {error}") from error
    if ran.returncode:
        raise StartError(f"{Path(control).name}: {(ran.stderr or ran.stdout).strip()}")
    return ran.stdout.split()


def attached(control: str, environ: Mapping[str, str]) -> bool:
    """True if this process is a client of the daemon; CUDA has to be initialized.

    CUDA says nothing when it finds no daemon: then it works without one.
    """
    servers = ask("get_server_list", control, environ)
    clients = [pid for s in servers for pid in ask(f"get_client_list {s}", control, environ)]
    return str(os.getpid()) in clients


def last_words(environ: Mapping[str, str]) -> str:
    """The end of the daemon's log."""
    with suppress(OSError):
        log = Path(environ["CUDA_MPS_LOG_DIRECTORY"], "control.log")
        return ": " + log.read_text(errors="replace").strip().rpartition("\n")[2]
    return ""
