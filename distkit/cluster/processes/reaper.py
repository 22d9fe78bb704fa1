"""The parent of the zygote: when the zygote ends, however, nothing that it started stays.

It is forked from the same Python before anything large is imported, holds no lifeline, and only
waits. What ranks have started is adopted by it when the zygote is killed (see
:mod:`distkit.cluster.processes.descendants`). If it is killed itself, the zygote ends in order.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from distkit.cluster.processes import folders
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.descendants import adopt_orphans, end_all_children
from distkit.cluster.processes.zygote import Zygote


def main(line: int, temporary: str) -> None:
    """Fork the zygote, and be its reaper; never returns.

    Args:
        line: the file descriptor of the zygote's line to the kernel.
        temporary: where the folders of clusters are.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        Zygote(Channel(socket.socket(fileno=line))).serve()
        sys.exit()
    os.close(line)  # or the kernel would not hear that the zygote has ended
    folders.sweep(temporary)
    status = _wait_for(pid)
    end_all_children()
    folders.sweep(temporary)
    os._exit(status if status >= 0 else 128 - status)


def _wait_for(zygote: int) -> int:
    """Wait until the zygote has ended; how it did."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == zygote:
            return os.waitstatus_to_exitcode(status)
