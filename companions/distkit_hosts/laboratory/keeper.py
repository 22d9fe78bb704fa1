"""The laboratory's keeper: it makes the hosts, holds them, and ends them with their maker.

Runs as a script, needs the standard library alone, and makes every host by ``fork``: a laboratory
costs one start of Python. It reads its plan as one line of JSON, and answers with one line: the
pids of the hosts, or what failed. Its own network namespace is the router between the hosts.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
_NEWPID, _NEWNET, _NEWTIME = 0x20000000, 0x40000000, 0x00000080
_BIND, _RECURSIVE, _SLAVE = 4096, 16384, 1 << 19
_PDEATHSIG, _SUBREAPER = 1, 36

#: A host's word begins with it when the host cannot be made.
_FAILED = "failed: "

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Make the hosts, wait until the maker has ended or asks for the end, and end them."""
    plan = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    _libc.prctl(_SUBREAPER, 1)  # so that _end() waits for all
    made: list[tuple[int, socket.socket]] = []
    try:
        print(json.dumps({"hosts": _make(plan, made)}), flush=True)
        select.select([plan["maker"]], [], [])  # readable once that process has ended
    except OSError as error:
        print(json.dumps({"error": _words(error)}), flush=True)
    finally:
        _end(made)
        shutil.rmtree(plan["folder"], ignore_errors=True)


def _end(made: list[tuple[int, socket.socket]]) -> None:
    """End the hosts: with its first process the kernel ends all of a host."""
    for pid, line in made:
        os.kill(pid, signal.SIGKILL)
        line.close()
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _make(plan: dict[str, Any], made: list[tuple[int, socket.socket]]) -> dict[str, int]:
    """Make the router and the hosts; return the pids of their first processes."""
    if plan["rootless"]:
        _become_root(os.getuid(), os.getgid())
    _do("unshare(net, mnt)", _libc.unshare(_NEWNET | _NEWNS))
    _mount(None, "/", None, _RECURSIVE | _SLAVE)  # what the machine unmounts is not kept in use
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for host in plan["hosts"]:
        made.append(_fork(host))
    lines = [line for _, line in made]
    pids = {host["name"]: int(_hear(line)) for host, line in zip(plan["hosts"], lines, strict=True)}
    _ip(plan["router"].format_map(pids))
    for line in lines:
        line.send(b"go")
    for line in lines:
        _hear(line)
    return pids


def _become_root(uid: int, gid: int) -> None:
    """Enter a user namespace in which this user is root."""
    _do("unshare(user)", _libc.unshare(_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _fork(host: dict[str, Any]) -> tuple[int, socket.socket]:
    """Fork what becomes a host; return its pid and the line to it.

    Between the keeper and a host's first process is one more, which ends with either: to make
    child after child in new pid namespaces without it, the keeper would have to be root.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        _attempt(theirs, lambda: _stand_between(host, theirs))
    theirs.close()
    return pid, ours


def _hear(line: socket.socket) -> str:
    """Wait for a host's word.

    Raises:
        OSError: the host cannot be made.
    """
    word = line.recv(4096).decode()
    if not word or word.startswith(_FAILED):
        raise OSError(0, word.removeprefix(_FAILED) or "a host has ended")
    return word


# -- in the processes of a host ------------------------------------------------------------------


def _attempt(line: socket.socket, function: Callable[[], None]) -> NoReturn:
    """Do what this process is for, and tell the keeper what fails."""
    try:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function()
    except Exception as error:
        line.send(f"{_FAILED}{_words(error)}".encode())
    os._exit(0)


def _stand_between(host: dict[str, Any], line: socket.socket) -> None:
    """Fork a host's first process, and end with it."""
    _do("unshare(pid)", _libc.unshare(_NEWPID))
    if host["skew"]:
        _do("unshare(time)", _libc.unshare(_NEWTIME))
        Path("/proc/self/timens_offsets").write_text(
            f"monotonic {host['skew']} 0\nboottime {host['skew']} 0\n"
        )
    pid = os.fork()
    if not pid:
        _attempt(line, lambda: _be(host, line))
    line.close()
    os.waitpid(pid, 0)


def _be(host: dict[str, Any], line: socket.socket) -> None:
    """Be a host: furnish it, then take in its orphans until the end."""
    os.setsid()
    _do("unshare(net, uts, mnt, ipc)", _libc.unshare(_NEWNET | _NEWUTS | _NEWNS | _NEWIPC))
    line.send(bytes(Path("/proc/self").readlink()))  # its pid outside: this is still their /proc
    if not line.recv(16):
        return  # another host failed
    _furnish(host)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries all orphans
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.chdir("/")
    line.send(b"well")
    os.closerange(3, 1024)
    while True:
        signal.pause()


def _furnish(host: dict[str, Any]) -> None:
    socket.sethostname(host["name"])
    _ip(host["network"])
    _mount("proc", "/proc", "proc")
    _cover("/sys", "sysfs", None, ["/sys/fs/cgroup"])  # whose devices are those of this host
    for path, mode in host["covers"]:
        _cover(path, "tmpfs", f"mode={mode}", host["keep"])
    for source, target in host["binds"]:
        _mount(source, target, None, _BIND)
    for setting, value in host["settings"].items():
        Path("/proc/sys", setting).write_text(value)


def _cover(path: str, kind: str, data: str | None, keep: list[str]) -> None:
    """Put a new file system over a folder; the folders to keep in it stay."""
    below = {Path(k) for k in keep if Path(path) in Path(k).parents and Path(k).exists()}
    inside = [folder for folder in sorted(below) if below.isdisjoint(folder.parents)]
    held = [os.open(k, os.O_PATH) for k in inside]
    _mount(kind, path, kind, 0, data)
    for folder, fd in zip(inside, held, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", str(folder), None, _BIND | _RECURSIVE)
        os.close(fd)


# -- the operating system's words ----------------------------------------------------------------


def _words(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.filename is None:
        return error.strerror or str(error)
    return str(error)


def _do(what: str, result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None
) -> None:
    words = [w and os.fsencode(w) for w in (source, target, kind)]
    mount: Callable[..., int] = _libc.mount
    _do(f"mount({target})", mount(*words, ctypes.c_ulong(flags), data and data.encode()))


def _ip(commands: str) -> None:
    """Run a batch of ``ip``'s commands in this process's network namespace."""
    ran = subprocess.run(["ip", "-batch", "-"], input=commands, capture_output=True, text=True)
    if ran.returncode:
        raise OSError(0, f"ip: {' '.join(ran.stderr.split())}")


if __name__ == "__main__":
    main()
