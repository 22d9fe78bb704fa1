"""The process that ranks are forked from: it has imported torch, and has a single thread.

Forking it gives a rank in milliseconds instead of seconds, and the ranks share its memory.
It is started once per kernel (see :mod:`distkit.cluster.processes.boot`), outlives the clusters of
that kernel, and ends with it: then it kills every process it forked, and what these have started.

Its parent is the *reaper*: when the zygote ends, however, nothing that it started stays. It is
forked from the same Python before anything large is imported, holds no lifeline, only waits, and
removes the folders that nobody holds any more.
What ranks have started is adopted by it when the zygote is killed (see
:mod:`distkit.cluster.processes.descendants`). If it is killed itself, the zygote ends in order.

Nothing here may start a thread, open a ZeroMQ context or touch CUDA: forks would inherit
them broken.
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
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.descendants import (
    PATIENCE,
    adopt_orphans,
    die_with_parent,
    end_all_children,
    end_children,
)
from distkit.cluster.processes.rank_spec import LATE
from distkit.errors import DistkitError

#: Where torch's compiler keeps files: it makes a folder as soon as it is imported.
CACHE = "TORCHINDUCTOR_CACHE_DIR"

#: Without children and tasks for so long [s], there is time to import what programs import late.
IDLE = 0.5

#: How often to look whether the kernel is still there, besides waiting for its line to break [s].
WATCH = 1.0


@dataclass
class Forked:
    """A child: its number, the folder it works in, and where its low-level output is."""

    number: int
    folder: str
    log: str


class Zygote:
    """Forks on command, and reports which of its children ended.

    Args:
        channel: the line to the kernel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel, self.parent = channel, os.getppid()
        self.children: dict[int, Forked] = {}  # by pid
        self.complete = False  # has imported what programs import late
        adopt_orphans()
        self.wakeup, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Do what the kernel asks until it is gone, then leave nothing behind."""
        try:
            while os.getppid() == self.parent:
                line = self.channel.fileno()
                wait = WATCH if self.complete or self.children else IDLE
                ready, _, _ = select.select([line, self.wakeup], [], [], wait)
                if not (ready or self.complete or self.children):
                    self.do_complete(None)
                if self.wakeup in ready:
                    os.read(self.wakeup, 512)
                self._reap()
                if line in ready:
                    message, fd = self.channel.recv_fd()
                    getattr(self, "do_" + message.pop("do"))(fd, **message)
        except (EOFError, OSError):
            pass
        finally:
            self._clean_up()

    def do_import(self, fd: int | None, modules: list[str]) -> None:
        """Import now what the children to come will need; of "module:function", call it, too."""
        for name in modules:
            module, _, function = name.partition(":")
            __import__(module)
            if function:
                getattr(sys.modules[module], function)()

    def do_complete(self, fd: int | None) -> None:
        """Import what programs import late; also called when there is nothing else to do."""
        if self.complete or "torch" not in sys.modules:
            return
        self.complete, theirs = True, os.environ.get(CACHE)
        try:
            __import__(LATE)
        except Exception:  # ranks that need it will say so
            traceback.print_exc()
        if theirs is None and (made := os.environ.pop(CACHE, "")):
            with suppress(OSError):  # it is in use
                Path(made).rmdir()

    def do_torch(self, fd: int | None) -> None:
        """Tell for which CUDA torch is built, and with which NCCL; neither is initialized."""
        import torch

        found = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else None
        self.channel.send({"cuda": torch.version.cuda, "nccl": found})

    def do_fork(
        self, fd: int, number: int, run: str, folder: str, log: str, arguments: bytes
    ) -> None:
        """Fork a child that calls ``run`` ("module:function") with its lifeline and arguments.

        The arguments are pickled, as they come from the kernel.
        """
        told = pickle.loads(arguments)  # here: what it imports is every child's
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every shared page
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes: the lifeline breaks at once
            print(f"distkit: cannot fork: {error}", file=sys.stderr)
            os.close(fd)
            return
        if pid == 0:
            self._child(fd, run, folder, log, told)
        os.close(fd)
        self.children[pid] = Forked(number, folder, f"{folder}/{log}")

    def do_kill(self, fd: int | None, numbers: Collection[int], over: bool = False) -> None:
        """End children and all that they started; ``over``: their logs are not needed."""
        for pid, child in self.children.items():
            if child.number in numbers:
                child.log = "" if over else child.log
                for end in (os.killpg, os.kill):
                    with suppress(ProcessLookupError):  # it has no group of its own yet
                        end(pid, signal.SIGKILL)

    def do_remove(self, fd: int | None, folder: str) -> None:
        """End the children that still work in a cluster's folder, then remove it.

        Some may have been forked since the kernel has listed the children to kill.
        """
        end = time.monotonic() + PATIENCE
        while there := [c.number for c in self.children.values() if c.folder == folder]:
            self.do_kill(None, there, over=True)
            if time.monotonic() > end:
                break
            time.sleep(0.001)
            self._reap()
        shutil.rmtree(folder, ignore_errors=True)

    def _child(self, fd: int, run: str, folder: str, log: str, arguments: dict[str, Any]) -> None:
        """The forked process: never returns."""
        status = 1
        try:
            os.setsid()  # a group of its own, so that whatever it starts can be ended with it
            die_with_parent()
            adopt_orphans()
            self.channel.close_here()
            os.close(self.wakeup)
            os.close(self._woken)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _redirect(f"{folder}/{log}")
            faulthandler.enable()  # a crash writes its Python lines into that file
            lifeline = Channel(socket.socket(fileno=fd))
            lifeline.send(("pid", os.getpid()))
            module, function = run.split(":")
            __import__(module)
            getattr(sys.modules[module], function)(lifeline, **arguments)
            status = 0
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 1
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
        """Hear who has ended or was stopped; what a child has left behind ends, too."""
        while changed := _next_changed():
            pid, status = changed
            child = self.children.get(pid)
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if child is not None:
                    stopped = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0
                    self.channel.send({"stopped": child.number, "signal": stopped})
                continue
            if child is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                del self.children[pid]
                how = {"status": os.waitstatus_to_exitcode(status), "log": child.log}
                self.channel.send({"exit": child.number, **how})
            end_children(but=self.children)  # orphans: of this one, or of an orphan

    def _clean_up(self) -> None:
        """End every child; the reaper removes their folders."""
        for pid in self.children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        end_all_children()


def _next_changed() -> tuple[int, int] | None:
    """A child that has ended, was stopped or goes on, and its status; None when there is none."""
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        return (pid, status) if pid else None
    return None


def _redirect(path: str) -> None:
    """Low-level output (crashes, C++ warnings) goes to a file that error messages can quote."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def main(line: str, temporary: str) -> None:
    """Fork the zygote, and be its reaper; never returns.

    Args:
        line: the file descriptor of the zygote's line to the kernel, as text.
        temporary: where the folders of clusters are.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        Zygote(Channel(socket.socket(fileno=int(line)))).serve()
        sys.exit()
    os.close(int(line))  # or the kernel would not hear that the zygote has ended
    folders.sweep(temporary)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end_all_children()
    folders.sweep(temporary)
    os._exit(status if status >= 0 else 128 - status)
