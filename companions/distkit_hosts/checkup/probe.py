"""Describe one machine and test its connections to others, using only the standard library.

The doctor sends the source of :mod:`distkit.cluster.machine`, followed by this file, to hosts where
distkit may not be installed, and runs both there with :data:`START`. The probe reads requests, one
JSON object per line, replies to each with a line that begins with :data:`MARK`, and exits when its
input ends. It listens for other probes on the given address, acknowledges connections that begin
with a secret, and executes nothing that they send.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

if __name__ != "probe":  # a probe already contains the source of that module
    from distkit.cluster.machine import (
        cgroup_memory,
        cpu_quota,
        gpus,
        usable_cores,
    )

#: Prefix of replies; a host's login banner does not contain it.
MARK = "distkit-probe "

#: A program that reads and runs source files from its input; the argument is their total length.
START = (
    "import sys;"
    "sys.version_info<(3,9) and sys.exit('Python %d.%d is too old'%sys.version_info[:2]);"
    "sys.path[:]=[p for p in sys.path if p];"  # a user's random.py would shadow Python's
    "names={'__name__':'probe'};"
    r"[exec(compile(t,'probe','exec'),names) for t in sys.stdin.read(int(sys.argv[1])).split('\f')]"
)

#: Timeout for a connection [s]. The timeout is twice as long for lookups and half as long for
#: datagrams.
TIMEOUT = 2.0

#: Maximum number of concurrent connections or lookups.
MAX_CONCURRENT = 200

#: Timeout for importing torch, which may be on a network file system [s].
IMPORT_TIMEOUT = 60

#: The packages whose versions are reported.
PACKAGES = ("torch", "ipyparallel", "distkit", "jupyterlab", "ipykernel", "anywidget", "numpy")

#: A probe exits if it gets no request for this long [s].
IDLE_TIMEOUT = 60

Json = dict[str, Any]


# -- this machine ----------------------------------------------------------------------------------


def machine() -> Json:
    """Describe this machine."""
    quota = cpu_quota()
    return {
        "hostname": socket.gethostname(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: package(name) for name in PACKAGES},
        "cores": {"usable": usable_cores(), "quota": quota if math.isfinite(quota) else None},
        "memory": {"free": free_memory()},
        "shm": disk_space("/dev/shm"),
        "temporary": disk_space(tempfile.gettempdir()),
        "gpus": gpus(),
        "addresses": addresses(),
    }


def free_memory() -> int:
    """Return the memory available to new processes [bytes]."""
    available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    return int(min(1024 * int(available[1] if available else 0), cgroup_memory()))


def disk_space(path: str) -> Json:
    """Return the size and free space of a file system [bytes], and whether it is writable."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return {"path": path, "error": error.strerror}
    return {
        "path": path,
        "size": status.f_blocks * status.f_frsize,
        "free": status.f_bavail * status.f_frsize,
        "writable": os.access(path, os.W_OK | os.X_OK),
    }


def package(name: str) -> str | None:
    """Return the version of a package: "?" if unknown, None if the package is not found."""
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text("utf-8")
    if assignment := re.search(r'^__version__ = "(.+)"', text, re.MULTILINE):
        return assignment[1]  # the imported copy may differ from the installed one
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?"


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine."""
    routes = Path("/proc/net/fib_trie").read_text()
    return sorted({*re.findall(r"(\d+\.\d+\.\d+\.\d+)\n +/32 host LOCAL", routes)})


def torch() -> Json:
    """Import torch in a separate process; return the versions of torch, CUDA and NCCL."""
    code = (
        "import sys; sys.path[:]=[p for p in sys.path if p];"
        "import json, torch; v = getattr(torch._C, '_nccl_version', None);"
        "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda,"
        "'nccl': torch.cuda.nccl.version() if v else None}))"
    )
    command = [sys.executable, "-c", code]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {
            "error": f"importing torch took more than {IMPORT_TIMEOUT} s. Check the host's load "
            "and its network file system"
        }
    if process.returncode:
        return {
            "error": [f"exit status {process.returncode}", *process.stderr.strip().splitlines()][-1]
        }
    versions: Json = json.loads(process.stdout.splitlines()[-1])
    return versions


# -- names and connections ----------------------------------------------------------------------


def resolve(name: str) -> Json:
    """Resolve a name to its IPv4 addresses."""
    try:
        result = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"addresses": [str(entry[4][0]) for entry in result]}


def concurrently(
    call: Callable[[Any], Any], items: Iterable[Any], timeout: float
) -> dict[Any, Any]:
    """Call a function on each item concurrently; omit items that time out or raise."""
    pool = futures.ThreadPoolExecutor(MAX_CONCURRENT)
    work = {item: pool.submit(call, item) for item in items}
    futures.wait(work.values(), timeout)
    return {
        i: future.result() for i, future in work.items() if future.done() and not future.exception()
    }


# -- requests --------------------------------------------------------------------------------------


#: Requests about this machine only. The first request, ``start``, shows that the probe is running.
_LOCAL: dict[str, Callable[..., Any]] = {"start": bool, "machine": machine, "torch": torch}


class Probe:
    """Handles requests with the functions in ``_LOCAL`` and its ``do_*`` methods."""

    def __init__(self) -> None:
        self._secret = b""
        self._sockets: list[socket.socket] = []
        self._senders: set[str] = set()  # senders of received datagrams

    def handle(self, request: Json) -> Json:
        """Return the reply to a request, or an error."""
        try:
            name = str(request.pop("do"))
            function = _LOCAL.get(name) or getattr(self, f"do_{name}")
            return {"reply": function(**request)}
        except Exception as error:  # the doctor reports it
            return {"error": f"{type(error).__name__}: {error}"}

    def do_resolve(self, names: list[str]) -> Json:
        """Resolve names with :func:`resolve`, within a time limit."""
        timed_out = {"error": f"no reply within {2 * TIMEOUT:g} s"}
        return {**dict.fromkeys(names, timed_out), **concurrently(resolve, names, 2 * TIMEOUT)}

    def do_has_file(self, path: str) -> bool:
        """Return whether this file exists here and contains its own path."""
        return Path(path).exists() and Path(path).read_text() == path

    def do_listen(self, address: str, secret: str) -> int:
        """Listen on a free port at an address and return the port."""
        self._secret = secret.encode()
        server = socket.create_server((address, 0))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(server.getsockname())
        self._sockets += [server, datagrams]
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        threading.Thread(target=self._receive, args=(datagrams,), daemon=True).start()
        return int(server.getsockname()[1])

    def _accept(self, server: socket.socket) -> None:
        while True:
            sock, _ = server.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Acknowledge a connection that begins with the secret."""
        with suppress(OSError), sock:
            sock.settimeout(TIMEOUT)
            received = sock.makefile("rb").read(len(self._secret))
            if hmac.compare_digest(received, self._secret):
                sock.sendall(b"!")

    def _receive(self, datagrams: socket.socket) -> None:
        while True:
            secret, _, name = datagrams.recv(1 << 10).partition(b"\n")
            if hmac.compare_digest(secret, self._secret):
                self._senders.add(name.decode())

    def do_reach(self, peers: dict[str, list[Any]]) -> Json:
        """Connect to the probe at each address and port; return "" or the error for each."""
        result = concurrently(lambda peer: self._reach(*peers[peer]), peers, 2 * TIMEOUT)
        return {**dict.fromkeys(peers, "timed out"), **result}

    def _reach(self, address: str, port: int) -> str:
        try:
            with socket.create_connection((address, port), TIMEOUT) as sock:
                sock.sendall(self._secret)
                return "" if sock.recv(1) else "another program is listening on that port"
        except OSError as error:
            return "timed out" if isinstance(error, TimeoutError) else strerror(error)

    def do_send_datagrams(self, name: str, peers: dict[str, list[Any]]) -> None:
        """Send three datagrams to each address and port."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for address, port in 3 * [*peers.values()]:
                with suppress(OSError):
                    s.sendto(self._secret + b"\n" + name.encode(), (address, port))

    def do_receive_datagrams(self, names: list[str], within: float) -> list[str]:
        """Wait for datagrams from all of ``names``, or until time is up, and return the senders."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and not self._senders.issuperset(names):
            time.sleep(0.01)
        return sorted(self._senders)


def strerror(error: OSError) -> str:
    """Return the text of an operating-system error."""
    return (error.strerror or str(error)).lower()


def main() -> None:
    """Reply to requests until the input ends."""
    probe = Probe()
    signal.alarm(IDLE_TIMEOUT)
    for text in sys.stdin:
        signal.alarm(IDLE_TIMEOUT)
        print(MARK + json.dumps(probe.handle(json.loads(text))), flush=True)
    os._exit(0)  # some threads are blocked forever


if __name__ == "probe":
    main()
