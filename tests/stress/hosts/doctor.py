"""Faults of laboratory hosts, which the doctor must find and name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distkit_hosts.laboratory import Laboratory
from distkit_hosts.laboratory.starting import find

#: The hosts; the doctor runs on the head, which it calls "here".
HOSTS = ("alpha", "beta")

#: The folder of the tested distkit; hosts may have another version installed.
ROOT = Path(__file__).resolve().parents[3]

#: Causes a fault, and returns options for the doctor.
Cause = Callable[[Laboratory], "Sequence[str | Path]"]

Check = Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Args:
        name: a description.
        kind: the kind of check that must fail.
        hosts: the hosts that the doctor must name, separated by spaces.
        cause: causes the fault.
        folder: the folder on the head where the doctor runs; "" for the current one.
    """

    name: str
    kind: str
    hosts: str
    cause: Cause = lambda lab: ()
    folder: str = ""


def diagnose(fault: Fault) -> list[Check]:
    """Return the problems that the doctor reports in a laboratory with a fault."""
    with Laboratory(HOSTS) as lab:
        lab.ssh()
        options = [*fault.cause(lab), "--python", _python(lab)]
        command = [sys.executable, "-m", "distkit", "doctor", "--json", "--hosts", ",".join(HOSTS)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/companions"}
        completed = lab.run(
            "head",
            [*command, *options],
            cwd=fault.folder or None,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if completed.returncode > 1 or not completed.stdout:
        raise RuntimeError(f"the doctor failed with {fault.name}: {completed.stderr}")
    checks = json.loads(completed.stdout)["checks"]
    return [check for check in checks if check["level"] != "ok"]


def verdict(fault: Fault, checks: Sequence[Check]) -> str:
    """Return the doctor's message for a fault, or "" if it is missing or there are others."""
    named = [
        c for c in checks if c["kind"] == fault.kind and {*fault.hosts.split()} <= {*c["hosts"]}
    ]
    others = [check for check in checks if check["kind"] != fault.kind]
    if not named or others or not all(check["remedy"] for check in checks):
        return ""
    return f"{named[0]['message']} {named[0]['remedy']}"


# -- causes ----------------------------------------------------------------------------------------


def _do(function: Callable[[Laboratory], None]) -> Cause:
    """Return a cause that calls a function with the laboratory."""

    def cause(lab: Laboratory) -> Sequence[str]:
        function(lab)
        return ()

    return cause


def _two_way_cut(lab: Laboratory) -> None:
    lab.drop("alpha", "beta")
    lab.drop("beta", "alpha")


def _ssh(lines: str) -> Cause:
    """Return a cause that changes the head's ssh settings for beta."""

    def cause(lab: Laboratory) -> Sequence[str | Path]:
        config = lab.folder / "doctor_config"
        config.write_text(f"Match host beta\n{lines}Match all\nInclude /etc/ssh/ssh_config\n")
        return "--ssh", f"ssh -F {config}"

    return cause


#: A filter for dynamic ports at both ends, which lets replies from ssh pass.
DYNAMIC_PORTS = "sport 1024-65534 dport 1024-65534"


def _filter(port: str, to: str, ports: str, how: str = "blackhole") -> Cause:
    """Return a cause that drops or refuses TCP connections from a router port to a host."""

    def cause(lab: Laboratory) -> Sequence[str]:
        rule = f"iif {port} to {lab.address(to)} ipproto tcp {ports} {how}"
        lab._admin(None, "ip", "rule", "add", "pref", "100", *rule.split())
        return ()

    return cause


def _password(lab: Laboratory) -> Sequence[str | Path]:
    """Start a second ssh server on beta, which accepts no key."""
    server = f"{find('sshd')} -f {lab.folder}/sshd_config -p 2222 -o AuthorizedKeysFile=none"
    lab.run("beta", server.split(), check=True)
    return _ssh("Port 2222\n")(lab)


def _administer(host: str | None, command: str) -> Cause:
    """Return a cause that runs a command as root on a host or, if None, on the router."""
    return _do(lambda lab: lab._admin(host, *command.split()))


def _hide(folder: Path) -> Cause:
    """Return a cause that mounts an empty file system over a folder on beta."""
    return _administer("beta", f"mount -t tmpfs tmpfs {folder}")


def _shrink(folder: str) -> Cause:
    """Return a cause that shrinks a file system on beta to 512 KiB."""
    return _administer("beta", f"mount --options-mode=ignore -o remount,size=512k {folder}")


def _python(lab: Laboratory) -> Path:
    """Return a Python with this distkit; on beta, a fault's modules come first on its path."""
    python = lab.folder / "python"
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT}:{ROOT}/companions\n"
        f'[ "$(hostname)" = beta ] && PYTHONPATH={lab.folder}/beta:$PYTHONPATH\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def _write(file: str, text: str) -> Cause:
    """Return a cause that writes a module for beta's Python."""

    def cause(lab: Laboratory) -> Sequence[str]:
        path = lab.folder / "beta" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return ()

    return cause


def _at_start(code: str) -> Cause:
    """Return a cause that makes beta's Python run code at startup."""
    return _write("sitecustomize.py", code)


def _folder(package: str) -> Path:
    """Return the folder of a package, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


_OLD = "import platform; platform.python_version = lambda: '3.10.4'\n"
_OLD_TORCH = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "2.9.1" if name == "torch" else version(name)
"""
_OLD_DISTKIT = "distkit/__init__.py", '__version__ = "0.0.1"\n'

#: All faults.
FAULTS = (
    Fault("a host is off the network", "ssh.silent", "beta", _do(lambda lab: lab.cut("beta"))),
    Fault("a host has crashed", "ssh.silent", "beta", _do(lambda lab: lab.crash("beta"))),
    Fault("the link between two hosts is cut", "connections.cut", "alpha beta", _do(_two_way_cut)),
    Fault(
        "one direction is lost",
        "connections.one_way",
        "alpha beta",
        _do(lambda lab: lab.drop("alpha", "beta")),
    ),
    Fault(
        "connections are silently dropped",
        "connections.filtered",
        "beta alpha",
        _filter("port1", "beta", DYNAMIC_PORTS),
    ),
    Fault(
        "connections are refused by a filter",
        "connections.filtered",
        "beta alpha",
        _filter("port1", "beta", DYNAMIC_PORTS, "prohibit"),
    ),
    Fault(
        "connections to the notebook are filtered",
        "connections.filtered",
        "here beta",
        _filter("port2", "head", DYNAMIC_PORTS),
    ),
    Fault("ssh is filtered", "ssh.silent", "beta", _filter("port0", "beta", "dport 22")),
    Fault(
        "a host's name is unknown here",
        "names.unknown",
        "beta",
        _do(lambda lab: lab.break_name("beta", on=["head"])),
    ),
    Fault(
        "a host's name is unknown on another",
        "names.unknown",
        "beta alpha",
        _do(lambda lab: lab.break_name("alpha", on=["beta"])),
    ),
    Fault(
        "a name resolves to 127.0.1.1",
        "names.loopback",
        "beta alpha",
        _do(lambda lab: lab.break_name("alpha", "127.0.1.1", ["beta"])),
    ),
    Fault(
        "a host's own name resolves to 127.0.1.1",
        "names.loopback",
        "beta",
        _do(lambda lab: lab.break_name("beta", "127.0.1.1", ["beta"])),
    ),
    Fault(
        "a name resolves to another machine",
        "names.wrong",
        "beta alpha",
        _do(lambda lab: lab.break_name("alpha", "198.18.0.99", ["beta"])),
    ),
    Fault(
        "a name has only an IPv6 address",
        "names.unknown",
        "alpha beta",
        _do(lambda lab: lab.break_name("beta", "fd00::2", ["alpha"])),
    ),
    Fault("a password is needed", "ssh.password", "beta", _password),
    Fault("no ssh server is running", "ssh.refused", "beta", _ssh("Port 2223\n")),
    Fault("the host's key is unknown", "ssh.key", "beta", _ssh("UserKnownHostsFile none\n")),
    Fault("Python has another version", "python.differs", "beta", _at_start(_OLD)),
    Fault("torch has another version", "torch.differs", "beta", _at_start(_OLD_TORCH)),
    Fault("distkit has another version", "distkit.differs", "beta", _write(*_OLD_DISTKIT)),
    Fault("torch is missing", "torch.missing", "beta", _hide(_folder("torch"))),
    Fault("torch is broken", "torch.broken", "beta", _hide(_folder("torch") / "lib")),
    Fault("ipyparallel is missing", "ipyparallel.missing", "beta", _hide(_folder("ipyparallel"))),
    Fault("the folder is not shared", "folder.unshared", "beta", folder="/tmp"),
    Fault("the disk is full", "disk", "beta", _shrink("/tmp")),
    Fault("shared memory is full", "shm", "beta", _shrink("/dev/shm")),
    Fault(
        "shared memory is small",
        "shm",
        "beta",
        _administer("beta", "mount -o remount,size=64m /dev/shm"),
    ),
)
