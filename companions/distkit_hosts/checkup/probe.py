"""What one machine has, and how it reaches others, by nothing but the standard library.

``distkit doctor`` sends this file, behind that of :mod:`distkit.cluster.machine`, to hosts where
distkit may not be installed, and starts both there with :data:`START`. It reads requests, one JSON
object a line, and answers each with a line that begins with :data:`MARK`; when its input ends, so
does it. To other probes it listens on the addresses that it is told, for connections that begin
with a secret, and executes nothing that comes in.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

if __name__ != "probe":  # there it is part of the same program
    from distkit.cluster.machine import (
        cgroup_memory,
        cgroups,
        cpu_quota,
        gpus,
        own_address,
        usable_cores,
        words,
    )

#: Answers begin so: what a host's shell prints at login does not.
MARK = "distkit-probe "

#: The program that reads the files' texts from its input, as many characters as its argument says.
START = (
    "import sys;"
    "sys.version_info<(3,9) and sys.exit('Python %d.%d is too old'%sys.version_info[:2]);"
    "sys.path[:]=[p for p in sys.path if p];"  # a random.py of the user's hides Python's
    "names={'__name__':'probe'};"
    r"[exec(compile(t,'probe','exec'),names) for t in sys.stdin.read(int(sys.argv[1])).split('\f')]"
)

#: A connection, a name or a message to another machine may take so long [s].
PATIENCE = 2.0

#: What may be missing, or of another version.
PACKAGES = ("torch", "ipyparallel", "distkit", "jupyterlab", "ipykernel", "anywidget", "numpy")

#: What starts ranks, and what a laboratory is made with.
COMMANDS = ("ssh", "srun", "mpiexec", "ip", "nsenter", "setpriv", "unshare")

#: A probe that nobody asks for so long ends: the line to the doctor is cut [s].
LONELY = 60

#: Linux: do not divide a datagram, whatever is known of the way.
_MTU_DISCOVER, _PROBE, _SIOCGIFADDR = 10, 3, 0x8915

#: Bytes of an IPv4 and a UDP header.
HEADERS = 28

#: Where programs are, those for administrators too.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])

#: The ports that connections and listeners get which ask for any.
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

#: The users that are people, not services.
_PEOPLE = 1000, 65000

Json = dict[str, Any]


# -- this machine ----------------------------------------------------------------------------------


def machine() -> Json:
    """All that is to be known about this machine without others."""
    home, temporary = str(Path("~").expanduser()), tempfile.gettempdir()
    return {
        "hostname": socket.gethostname(),
        "system": platform.platform(),
        "user": os.getuid(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: package(name) for name in PACKAGES},
        "distkit": digest("distkit"),
        "cores": {"usable": usable_cores(), "quota": _finite(cpu_quota())},
        "memory": memory(),
        "shm": room("/dev/shm"),
        "temporary": room(temporary),
        "home": room(home),
        "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "processes": processes(),
        "ports": [int(n) for n in words(_PORTS)],
        "gpus": gpus(),
        "interfaces": interfaces(),
        "loopback": loopback(),
        "commands": {name: shutil.which(name, path=_PATH) for name in COMMANDS},
        "namespaces": namespaces(),
        "hub": hub(),
    }


def memory() -> Json:
    """Bytes: all, free, and those that new processes may still take."""
    text = Path("/proc/meminfo").read_text()
    total, free = (
        int(found[1]) * 1024 if (found := re.search(rf"{name}:\s+(\d+)", text)) else 0
        for name in ("MemTotal", "MemAvailable")
    )
    return {"total": total, "free": int(min(free, cgroup_memory()))}


def room(path: str) -> Json:
    """How large a file system is and what is left of it [bytes]; whether one may write there."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return {"path": path, "error": error.strerror}
    return {
        "path": path,
        "size": status.f_blocks * status.f_frsize,
        "free": status.f_bavail * status.f_frsize,
        "files": status.f_favail if status.f_files else None,  # btrfs has no limit
        "writable": os.access(path, os.W_OK | os.X_OK),
    }


def processes() -> Json:
    """Threads of this user, and how many are allowed; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [] if os.getuid() == 0 or soft == resource.RLIM_INFINITY else [(_threads(), soft)]
    for cgroup in cgroups("pids"):
        most, now = words(cgroup / "pids.max"), words(cgroup / "pids.current")
        if most and now and most[0] != "max":
            limits.append((int(now[0]), int(most[0])))
    left = min((limit - used for used, limit in limits), default=None)
    return {"left": left}


def hub() -> Json | None:
    """What JupyterHub promises this server, and how many people it sees; None elsewhere."""
    user = os.environ.get("JUPYTERHUB_USER")
    if not user:
        return None
    promised, seen = os.environ.get("MEM_LIMIT", ""), set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            seen.add(path.stat().st_uid)
    people = [uid for uid in seen - {os.getuid()} if _PEOPLE[0] <= uid < _PEOPLE[1]]
    memory = int(promised) if promised.isdigit() else None
    return {"user": user, "memory": memory, "others": len(people)}


def _threads() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found += len([*(path / "task").iterdir()]) * (path.stat().st_uid == os.getuid())
        except OSError:  # it has ended
            continue
    return found


def package(name: str) -> str | None:
    """The version of a package; None if it is not there to import."""
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    written = re.search(
        r'^__version__ = "(.+)"', Path(spec.origin).read_text("utf-8"), re.MULTILINE
    )
    if written:  # of this copy: there may be another one that is installed
        return written[1]
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?"


def digest(name: str) -> str:
    """What tells two copies of a package's sources apart; "" if it is not there."""
    spec = util.find_spec(name) if package(name) else None
    if spec is None or spec.origin is None:
        return ""
    folder, found = Path(spec.origin).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def interfaces() -> dict[str, Json]:
    """The network interfaces that have an address, and their largest frames [bytes]."""
    found = {}
    for _, name in socket.if_nameindex():
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                asked = struct.pack("256s", name.encode()[:15])
                address = socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, asked)[20:24])
        except OSError:
            continue
        mtu = words(Path("/sys/class/net", name, "mtu"))
        found[name] = {"address": address, "mtu": int(mtu[0]) if mtu else 0}
    return found


def loopback() -> str:
    """Why this machine cannot connect to itself; "" if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), PATIENCE).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def namespaces() -> str:
    """Why this user may not make hosts of namespaces; "" if he may."""
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, *"--uts --net --mount --ipc --pid --fork true".split()]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (ran.stderr.strip() or "unshare failed") if ran.returncode else ""


def torch() -> Json:
    """What torch says of itself when it is imported, in a process of its own."""
    code = (
        "import json, torch, torch.distributed as d; v = getattr(torch._C, '_nccl_version', None);"
        "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda,"
        "'gloo': d.is_gloo_available(), 'nccl': torch.cuda.nccl.version() if v else None}))"
    )
    command = [sys.executable, "-c", "import sys; sys.path[:]=[p for p in sys.path if p];" + code]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return {"slow": 20}
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1]}
    answer: Json = json.loads(ran.stdout.splitlines()[-1])
    return answer


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


# -- names and ways to others ----------------------------------------------------------------------


def resolve(name: str) -> Json:
    """The IPv4 addresses of a name, and the name of the first of them; or those of IPv6."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    addresses = list(dict.fromkeys(str(e[4][0]) for e in found if e[0] == socket.AF_INET))
    if not addresses:
        return {"error": "only IPv6", "ipv6": [str(entry[4][0]) for entry in found]}
    try:
        back = socket.getnameinfo((addresses[0], 0), socket.NI_NAMEREQD)[0]
    except OSError:
        back = ""
    return {"addresses": addresses, "back": back}


def route(address: str) -> Json:
    """The interface by which packets to an address leave, and the address that they come from."""
    try:
        source = own_address(address)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    of = {"interface": "", "mtu": 0}
    for name, facts in interfaces().items():
        if facts["address"] == source:
            of = {"interface": name, "mtu": facts["mtu"]}
    return {"source": source, **of}


def at_once(what: Callable[[Any], Any], items: Iterable[Any], patience: float) -> dict[Any, Any]:
    """Results for the items, worked on at the same time; without those that take too long."""
    results: dict[Any, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: what(i)}), daemon=True)
        for i in dict.fromkeys(items)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


# -- talking to other probes -----------------------------------------------------------------------


class Probe:
    """Answers requests: each ``do_*`` method is one."""

    def __init__(self) -> None:
        self._secret = b""
        self._sockets: list[socket.socket] = []
        self._heard: dict[str, set[int]] = {}  # name of the sender -> sizes of its datagrams

    def answer(self, request: Json) -> Json:
        """The answer to a request, or why there is none."""
        try:
            what = getattr(self, "do_" + str(request.pop("do")))
            return {"answer": what(**request)}
        except Exception as error:  # whatever it is, the doctor says it
            return {"error": f"{type(error).__name__}: {error}"}

    def do_machine(self) -> Json:
        """See :func:`machine`."""
        return machine()

    def do_torch(self) -> Json:
        """See :func:`torch`."""
        return torch()

    def do_clock(self) -> list[float]:
        """This machine's two clocks [s]."""
        return [time.time(), time.monotonic()]

    def do_resolve(self, names: list[str]) -> Json:
        """See :func:`resolve`; a resolver that does not answer is waited for at most so long."""
        silent = {"error": f"no answer within {2 * PATIENCE:g} s", "silent": True}
        return {**dict.fromkeys(names, silent), **at_once(resolve, names, 2 * PATIENCE)}

    def do_route(self, addresses: list[str]) -> Json:
        """See :func:`route`."""
        return {address: route(address) for address in addresses}

    def do_see(self, files: dict[str, str]) -> dict[str, bool]:
        """Whether files with these contents are here."""

        def there(path: str) -> bool:
            try:
                return Path(path).read_text() == files[path]
            except OSError:
                return False

        return {**dict.fromkeys(files, False), **at_once(there, files, PATIENCE)}

    def do_listen(self, addresses: list[str], ports: list[int], secret: str) -> Json:
        """Listen on these ports, 0 for any, of these addresses: the ports, or why not."""
        self._secret = secret.encode()
        return {a: {str(p): self._listen(a, p) for p in ports} for a in addresses}

    def _listen(self, address: str, port: int) -> Any:
        try:
            server = socket.create_server((address, port))
        except OSError as error:
            return error.strerror or str(error)
        self._sockets.append(server)
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            datagrams.bind((address, port))
        except OSError:  # another program's: only connections are tried
            return port
        self._sockets.append(datagrams)
        threading.Thread(target=self._hear, args=(datagrams,), daemon=True).start()
        return port

    def _accept(self, server: socket.socket) -> None:
        while True:
            line, _ = server.accept()
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        """Acknowledge messages, each after its last byte."""
        try:
            with line:
                line.settimeout(5 * PATIENCE)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(read(line, len(self._secret)), self._secret):
                    return
                while True:
                    read(line, struct.unpack("!Q", read(line, 8))[0], keep=False)
                    line.sendall(b"!")
        except OSError:
            return

    def _hear(self, datagrams: socket.socket) -> None:
        while True:
            text = datagrams.recv(1 << 16)
            head = text[:256].split(b"\n")
            if len(head) > 2 and hmac.compare_digest(head[0], self._secret):
                self._heard.setdefault(head[1].decode(), set()).add(len(text))

    def do_reach(self, peers: dict[str, list[Any]]) -> Json:
        """Connect to other probes: to each address and port, "" or why it did not work."""
        silent = "timed out"
        found = at_once(lambda peer: self._reach(*peers[peer]), peers, 2 * PATIENCE)
        return {**dict.fromkeys(peers, silent), **found}

    def _reach(self, address: str, port: int) -> str:
        try:
            with self._connect(address, port) as line:
                line.settimeout(PATIENCE)
                send(line, 1)
        except OSError as error:
            return "timed out" if isinstance(error, TimeoutError) else strerror(error)
        return ""

    def do_knock(self, peers: dict[str, list[Any]]) -> Json:
        """Whether something answers at each address and port, be it to refuse."""

        def knock(peer: str) -> bool:
            try:
                socket.create_connection(tuple(peers[peer]), PATIENCE).close()
            except OSError as error:
                return error.errno == errno.ECONNREFUSED
            return True

        return {**dict.fromkeys(peers, False), **at_once(knock, peers, 2 * PATIENCE)}

    def _connect(self, address: str, port: int) -> socket.socket:
        line = socket.create_connection((address, port), PATIENCE)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(self._secret)
        return line

    def do_shout(self, name: str, peers: dict[str, list[Any]]) -> Json:
        """Send datagrams that must not be divided, each three times: (address, port, sizes)."""
        return {peer: self._shout(name, *peers[peer]) for peer in peers}

    def _shout(self, name: str, address: str, port: int, sizes: list[int]) -> dict[str, str]:
        head = self._secret + b"\n" + name.encode() + b"\n"
        said = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _PROBE)
            for size in sizes:
                for _ in range(3):
                    try:
                        s.sendto(head.ljust(size, b"."), (address, port))
                        said[str(size)] = ""
                    except OSError as error:
                        said[str(size)] = strerror(error)
        return said

    def do_heard(self, wanted: dict[str, list[int]], within: float) -> dict[str, list[int]]:
        """The sizes of the datagrams that came from each, as soon as all wanted ones are here."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and not all(
            set(sizes) <= self._heard.get(name, set()) for name, sizes in wanted.items()
        ):
            time.sleep(0.01)
        return {name: sorted(sizes) for name, sizes in list(self._heard.items())}

    def do_measure(self, address: str, port: int, sizes: list[int], seconds: float) -> Json:
        """How long messages of these sizes take with their acknowledgement: samples by size [s]."""
        samples: dict[str, list[float]] = {}
        try:
            with self._connect(address, port) as line:
                line.settimeout(2 * PATIENCE)
                deadline = time.monotonic() + seconds
                send(line, 1)  # the connection's first message is slow
                while time.monotonic() < deadline:
                    for size in sizes:
                        if _is_short(samples, size, seconds):
                            samples.setdefault(str(size), []).append(send(line, size))
        except OSError as error:
            why = "timed out" if isinstance(error, TimeoutError) else strerror(error)
            return {"samples": samples, "error": why}
        return {"samples": samples}


def _is_short(samples: dict[str, list[float]], size: int, seconds: float) -> bool:
    """True unless a smaller message has shown that this one takes too long."""
    known = {int(s): min(times) for s, times in samples.items()}
    largest = max((s for s in known if s <= size), default=0)
    return not largest or known[largest] * max(1, size / max(largest, 1 << 12)) < seconds / 2


def send(line: socket.socket, size: int) -> float:
    """Send so many bytes; seconds until they are acknowledged."""
    message = struct.pack("!Q", size) + bytes(size)
    began = time.perf_counter()
    line.sendall(message)
    read(line, 1)
    return time.perf_counter() - began


def read(line: socket.socket, size: int, keep: bool = True) -> bytes:
    """So many bytes; or only wait for them.

    Raises:
        ConnectionError: the other end has closed the line.
    """
    found = bytearray()
    while size:
        chunk = line.recv(min(size, 1 << 20))
        if not chunk:
            raise ConnectionError(errno.ECONNRESET, "another program answers")
        size -= len(chunk)
        if keep:
            found += chunk
    return bytes(found)


def strerror(error: OSError) -> str:
    """The system's words for an error."""
    return (error.strerror or str(error)).lower()


def main() -> None:
    """Answer requests until there are no more."""
    probe = Probe()
    signal.alarm(LONELY)
    for text in sys.stdin:
        signal.alarm(LONELY)
        print(MARK + json.dumps(probe.answer(json.loads(text))), flush=True)
    os._exit(0)  # threads wait in calls that do not end


if __name__ == "probe":
    main()
