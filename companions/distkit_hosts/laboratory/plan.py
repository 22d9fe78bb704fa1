"""Plan a laboratory: the hosts' names and addresses, and their shared and private folders.

The network is a router with a port for each host. A host has one interface, ``eth0``, with its
address, and reaches the others through the router, like machines in different racks. The router
serves only the laboratory and drops or delays packets on request.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from distkit import errors

#: The private folders of every host, and their modes.
_PRIVATE_FOLDERS = {"/tmp": "1777", "/var/tmp": "1777", "/dev/shm": "1777", "/run": "755"}

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")

#: Configuration files of programs; the hosts read them from the laboratory's folder.
_SETTINGS = ("/etc/ssh/ssh_config", "/etc/shadow", "/etc/slurm")

#: The folder where a host assembles a file system; it exists on every machine.
_STAGING = "/sys/kernel"

#: Reserved for tests of network devices (RFC 2544), so no site routes these addresses.
NETWORK = IPv4Network("198.18.0.0/24")


def check_names(hosts: Sequence[str]) -> list[str]:
    """Check the names of hosts and return them.

    >>> check_names(["head", "alpha"])
    ['head', 'alpha']

    Raises:
        LaboratoryError: a name is not a valid hostname or occurs twice, or there are no hosts or
            more than 200.
    """
    wrong = [host for host in hosts if not _NAME.fullmatch(host) or host == "localhost"]
    if wrong or not 1 <= len({*hosts}) == len(hosts) <= 200:
        raise errors.LaboratoryError(
            f"invalid host names: {', '.join(hosts)!r}. Use 1 to 200 different names of "
            "lowercase letters, digits and '-'; 'localhost' is reserved."
        )
    return list(hosts)


def shared_folders(extra: Iterable[str | Path]) -> list[str]:
    """Return the folders that all hosts share: those that ranks need, and ``extra``."""
    checkout = Path(errors.__file__).parents[1]
    paths = [sys.prefix, sys.base_prefix, checkout, Path.home(), Path.cwd(), *extra]
    return [str(Path(path).expanduser().resolve()) for path in paths]


def make_plan(
    folder: Path, hosts: Mapping[str, str], shared: list[str], skew: Mapping[str, int]
) -> dict[str, Any]:
    """Return the plan for the init process and create the private files of the hosts.

    Args:
        folder: the folder of the laboratory.
        hosts: the address of each host.
        shared: the folders that all hosts share.
        skew: the offset of hosts' monotonic clocks [s].
    """
    folder.joinpath("slurm").mkdir()
    for name in ("ssh_config", "shadow"):
        folder.joinpath(name).touch()
    # packets to a host that has exited are lost silently
    router = f"link set lo up\nroute add blackhole {NETWORK}\n"
    for number, address in enumerate(hosts.values()):
        router += _connect(f"port{number}", address, f"{{{number}}}")
    specs = [
        {"skew": skew.get(host, 0), "commands": _setup(folder, host, address, shared)}
        for host, address in hosts.items()
    ]
    return {"folder": str(folder), "router": router, "hosts": specs}


def _setup(folder: Path, host: str, address: str, shared: list[str]) -> str:
    """Return the commands that set up a host's name, network and private folders."""
    binds = {str(folder / host / "hosts"): "/etc/hosts"}
    binds |= {str(folder / Path(p).name): p for p in _SETTINGS if Path(p).exists()}
    commands = [
        f"hostname {host}",
        f"ip -batch - <<.\n{_join(address)}.",
        "mount -n -t proc proc /proc",
        # so that /sys lists the devices of the host
        *_cover("/sys", "sysfs", [], ["/sys/fs/cgroup"]),
    ]
    for path, mode in _PRIVATE_FOLDERS.items():
        commands += _cover(path, "tmpfs", ["-o", f"mode={mode}"], shared)
    commands += [shlex.join(["mount", "-n", "--bind", *pair]) for pair in binds.items()]
    # so that an ordinary user's SSH server can listen on port 22
    commands.append("echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start")
    return "\n".join([*commands, ""])


def _cover(path: str, kind: str, options: list[str], keep: list[str]) -> Iterator[str]:
    """Yield the commands that mount a new file system over a folder, without hiding ``keep``."""
    nested = {Path(k) for k in keep if Path(path) in Path(k).parents and Path(k).exists()}
    yield shlex.join(["mount", "-n", "-t", kind, *options, kind, _STAGING])
    for folder in sorted(nested):
        if nested.isdisjoint(folder.parents):
            target = str(Path(_STAGING, folder.relative_to(path)))
            yield shlex.join(["mkdir", "-p", target])
            yield shlex.join(["mount", "-n", "--rbind", str(folder), target])
    yield shlex.join(["mount", "-n", "--move", _STAGING, path])


# -- the network ----------------------------------------------------------------------------------


def addresses(hosts: Sequence[str]) -> dict[str, str]:
    """Return the address of each host; the router has the first one.

    >>> addresses(["head", "alpha"])
    {'head': '198.18.0.2', 'alpha': '198.18.0.3'}
    """
    return {host: str(NETWORK[n]) for n, host in enumerate(hosts, 2)}


def _connect(port: str, address: str, pid: str) -> str:
    """Return the router's ``ip`` commands for a port whose other end is a host's ``eth0``."""
    return f"""link add {port} type veth peer name eth0 netns {pid}
addr add {NETWORK[1]}/32 dev {port}
link set {port} up
route add {address} dev {port}
"""


def _join(address: str) -> str:
    """Return the ``ip`` commands for a host."""
    return f"""link set lo up
addr add {address}/32 dev eth0
link set eth0 up
route add {NETWORK[1]} dev eth0 src {address}
route add {NETWORK} via {NETWORK[1]} dev eth0 src {address}
"""


def hosts_file(names: dict[str, str | None]) -> str:
    """Return the text of ``/etc/hosts``; a name without an address cannot be resolved.

    >>> print(hosts_file({"alpha": "198.18.0.2", "beta": None}), end="")
    127.0.0.1 localhost
    ::1 localhost ip6-localhost ip6-loopback
    198.18.0.2 alpha
    """
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for name, address in names.items() if address]
    return "\n".join(lines) + "\n"
