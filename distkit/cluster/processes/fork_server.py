"""The fork server: a single-threaded process that has imported torch and forks ranks.

A fork starts a rank in milliseconds instead of seconds, and the ranks share the fork server's
memory. The fork server starts once per kernel (see ``fork_client.py``) and outlives the kernel's
clusters. When the kernel exits, the fork server kills all its descendants and exits.

The fork server's parent is the *subreaper*, which forks the fork server before large imports, holds
no lifeline, waits until the fork server exits, kills the remaining descendants and removes the
folders. When the fork server is killed, the subreaper adopts the ranks' children (see
:mod:`distkit.cluster.processes.cleanup`). If the subreaper is killed, the fork server shuts down.

Nothing here may start a thread, open a ZeroMQ context or use CUDA, because none of these works
after a fork.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distkit import imports
from distkit.cluster.processes import cleanup
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.cleanup import (
    END_TIMEOUT,
    adopt_orphans,
    die_with_parent,
    kill_all_children,
    kill_children,
)
from distkit.errors import DistkitError

#: ``INTERVAL`` is the time between checks that the parent is alive [s]. The fork server is idle
#: after ``IDLE_INTERVALS`` intervals without requests or children.
INTERVAL, IDLE_INTERVALS = 0.5, 4


@dataclass
class ForkedChild:
    """A child: its number, its folder, and the file for its low-level output."""

    number: int
    folder: str
    log: str


class ForkServer:
    """The process that forks children on command and reports their exits.

    Args:
        channel: the channel to the kernel.
    """

    def __init__(self, channel: Channel) -> None:
        gc.disable()  # collections would slow imports down by a quarter; do_fork runs one
        self.channel, self.parent = channel, os.getppid()
        self.children: dict[int, ForkedChild] = {}  # by pid
        adopt_orphans()
        self.wakeup, self._wakeup_w = os.pipe()
        os.set_blocking(self._wakeup_w, False)
        signal.set_wakeup_fd(self._wakeup_w)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, self._exit_with_kernel)

    def serve(self) -> None:
        """Execute the kernel's commands until the kernel exits, then kill all descendants."""
        idle = 0
        try:
            while os.getppid() == self.parent:
                channel_fd = self.channel.fileno()
                ready, _, _ = select.select([channel_fd, self.wakeup], [], [], INTERVAL)
                idle = 0 if ready or self.children else idle + 1
                if idle == IDLE_INTERVALS and "torch" in sys.modules:
                    # optimizers and DistributedDataParallel need this module, which imports FSDP
                    self.do_call(None, "torch._dynamo")
                if self.wakeup in ready:
                    os.read(self.wakeup, 512)
                self._reap()
                if channel_fd in ready:
                    message, fd = self.channel.recv_fd()
                    getattr(self, "do_" + message.pop("do"))(fd, **message)
        except (EOFError, OSError):
            pass
        finally:
            self._kill_all_children()

    def _kill_all_children(self) -> None:
        self.do_kill(None, [child.number for child in self.children.values()])
        kill_all_children()  # the subreaper removes their folders

    def _exit_with_kernel(self, *_: object) -> None:
        """Exit if the channel is closed because the kernel has exited."""
        poll = select.poll()
        poll.register(self.channel, select.POLLRDHUP)
        if poll.poll(0):
            self._kill_all_children()
            os._exit(0)

    def do_call(self, fd: int | None, target: str) -> None:
        """Import ``target`` ("module") for future children, or call it ("module:function").

        An import may take seconds, so a timer checks whether the kernel has exited meanwhile.
        """
        signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
        try:
            imports.call_target(target)
        except Exception:  # children that need it will report the error
            traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def do_torch(self, fd: int | None) -> None:
        """Send torch's versions of CUDA and NCCL, without initializing them."""
        import torch

        nccl = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else None
        self.channel.send({"cuda": torch.version.cuda, "nccl": nccl})

    def do_fork(
        self, fd: int, number: int, target: str, folder: str, log: str, arguments: bytes
    ) -> None:
        """Fork a child that calls ``target`` ("module:function") with its lifeline and arguments.

        ``arguments`` was pickled by the kernel.
        """
        kwargs = pickle.loads(arguments)  # here, so that all children share the imported modules
        gc.collect()
        gc.freeze()  # the collector would write to every shared page and thereby copy it
        try:
            if (pid := os.fork()) == 0:
                self._child(fd, target, folder, log, kwargs)
            self.children[pid] = ForkedChild(number, folder, f"{folder}/{log}")
        except OSError as error:  # out of memory or processes; closing the lifeline reports it
            print(f"distkit: cannot fork: {error}", file=sys.stderr)
        finally:
            os.close(fd)

    def do_kill(self, fd: int | None, numbers: Collection[int], discard_logs: bool = False) -> None:
        """Kill children and their descendants; optionally discard their logs."""
        for pid, child in self.children.items():
            if child.number in numbers:
                child.log = "" if discard_logs else child.log
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError, PermissionError):  # it has no group yet
                        kill(pid, signal.SIGKILL)

    def do_remove(self, fd: int | None, folder: str) -> None:
        """Kill the remaining children in a cluster's folder, then remove the folder.

        Some may have been forked after the kernel listed the children to kill. A child in
        uninterruptible sleep exits later, and must not block other clusters.
        """
        deadline = time.monotonic() + END_TIMEOUT
        while (
            remaining := [c.number for c in self.children.values() if c.folder == folder]
        ) and time.monotonic() < deadline:
            self.do_kill(None, remaining, discard_logs=True)
            time.sleep(0.001)
            self._reap()
        shutil.rmtree(folder, ignore_errors=True)

    def _child(
        self, fd: int, target: str, folder: str, log: str, arguments: dict[str, Any]
    ) -> None:
        """Run the forked process; never returns."""
        status = 1
        gc.enable()
        try:
            os.setsid()  # its own process group, which includes its children
            die_with_parent()
            adopt_orphans()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            _redirect(f"{folder}/{log}")
            faulthandler.enable()  # writes the Python stack of a crash into the log
            lifeline = Channel(socket.socket(fileno=fd))
            lifeline.send(("pid", os.getpid()))
            imports.call_target(target, lifeline, **arguments)
            status = 0
        except DistkitError as error:
            print(error, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        """Report children that have exited and kill the orphans that they left."""
        with suppress(ChildProcessError):  # no children are left
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                self._handle_end(*reaped)

    def _handle_end(self, pid: int, status: int) -> None:
        if pid in self.children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            child = self.children.pop(pid)
            self.channel.send(
                {
                    "exit": child.number,
                    "status": os.waitstatus_to_exitcode(status),
                    "log": child.log,
                }
            )
        kill_children(exclude=self.children)  # the orphans that this process has adopted


def _redirect(path: str) -> None:
    """Redirect low-level output (crashes, C++ warnings) to a file that errors can quote."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def main(channel_fd: str, prefix: str) -> None:
    """Start the fork server and act as its subreaper; never returns.

    Args:
        channel_fd: the file descriptor of the fork server's channel to the kernel, as text.
        prefix: prefix of the clusters' folders.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    if (pid := os.fork()) == 0:
        ForkServer(Channel(socket.socket(fileno=int(channel_fd)))).serve()
        os._exit(0)  # a normal exit would destroy torch's modules and delay the kernel by up to 1 s
    os.close(int(channel_fd))  # so that the channel closes when the fork server exits
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kill_all_children()
    cleanup.remove_folders(prefix)
    os._exit(status if status >= 0 else 128 - status)
