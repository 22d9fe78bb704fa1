"""Deliberate faults of hosts in a laboratory, for the doctor to find and name."""

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

#: The tested sources: hosts may have another distkit installed.
ROOT = Path(__file__).resolve().parents[3]

#: Makes a fault and returns options for the doctor.
Cause = Callable[[Laboratory], "Sequence[str | Path]"]

Check = Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """A deliberate fault.

    Args:
        name: what is wrong.
        kind: the doctor's name for it.
        hosts: the machines that the doctor must name, separated by spaces.
        cause: makes the fault.
        folder: the folder on the head where the doctor runs; "" for the current one.
    """

    name: str
    kind: str
    hosts: str
    cause: Cause = lambda lab: ()
    folder: str = ""


def diagnose(fault: Fault) -> list[Check]:
    """The problems that the doctor reports in a laboratory with a fault."""
    with Laboratory(HOSTS) as lab:
        lab.ssh()
        options = [*fault.cause(lab), "--python", _python(lab)]
        command = [sys.executable, "-m", "distkit", "doctor", "--json", "--hosts", ",".join(HOSTS)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/companions"}
        ran = lab.run(
            "head",
            [*command, *options],
            cwd=fault.folder or None,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if ran.returncode > 1 or not ran.stdout:
        raise RuntimeError(f"the doctor failed with {fault.name}: {ran.stderr}")
    checks = json.loads(ran.stdout)["checks"]
    return [check for check in checks if check["level"] != "ok"]


def verdict(fault: Fault, checks: Sequence[Check]) -> str:
    """The doctor's message for a fault; "" if it does not name it or reports others."""
    named = [
        c for c in checks if c["kind"] == fault.kind and {*fault.hosts.split()} <= {*c["hosts"]}
    ]
    others = [check for check in checks if check["kind"] != fault.kind]
    if not named or others or not all(check["remedy"] for check in checks):
        return ""
    return f"{named[0]['message']} {named[0]['remedy']}"


# -- causes ----------------------------------------------------------------------------------------


def _do(fault: Callable[[Laboratory], None]) -> Cause:
    """Wrap a function of the laboratory as a cause."""

    def cause(lab: Laboratory) -> Sequence[str]:
        fault(lab)
        return ()

    return cause


def _two_way_cut(lab: Laboratory) -> None:
    lab.drop("alpha", "beta")
    lab.drop("beta", "alpha")


def _ssh(lines: str) -> Cause:
    """Change the settings of the head's ssh for beta."""

    def cause(lab: Laboratory) -> Sequence[str | Path]:
        config = lab.folder / "doctor_config"
        config.write_text(f"Match host beta\n{lines}Match all\nInclude /etc/ssh/ssh_config\n")
        return "--ssh", f"ssh -F {config}"

    return cause


#: The dynamic ports at both ends; replies of ssh pass.
UNUSED = "sport 1024-65534 dport 1024-65534"


def _filter(port: str, to: str, ports: str, how: str = "blackhole") -> Cause:
    """Drop or refuse TCP connections from a router port to a host's ports."""

    def cause(lab: Laboratory) -> Sequence[str]:
        rule = f"iif {port} to {lab.address(to)} ipproto tcp {ports} {how}"
        lab._admin(None, "ip", "rule", "add", "pref", "100", *rule.split())
        return ()

    return cause


def _password(lab: Laboratory) -> Sequence[str | Path]:
    """Start a second server on beta that accepts no key."""
    server = f"{find('sshd')} -f {lab.folder}/sshd_config -p 2222 -o AuthorizedKeysFile=none"
    lab.run("beta", server.split(), check=True)
    return _ssh("Port 2222\n")(lab)


def _administer(host: str | None, command: str) -> Cause:
    """Run a command as administrator of a host or, without one, of the router."""
    return _do(lambda lab: lab._admin(host, *command.split()))


def _hide(folder: Path) -> Cause:
    """Put an empty folder in the place of one of beta's."""
    return _administer("beta", f"mount -t tmpfs tmpfs {folder}")


def _shrink(folder: str) -> Cause:
    """Leave half a megabyte in a file system of beta."""
    return _administer("beta", f"mount --options-mode=ignore -o remount,size=512k {folder}")


def _python(lab: Laboratory) -> Path:
    """A Python with this distkit; on beta it imports the files of a fault first."""
    python = lab.folder / "python"
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT}:{ROOT}/companions\n"
        f'[ "$(hostname)" = beta ] && PYTHONPATH={lab.folder}/beta:$PYTHONPATH\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def _write(file: str, text: str) -> Cause:
    """Write a file that shadows a module of beta's Python."""

    def cause(lab: Laboratory) -> Sequence[str]:
        path = lab.folder / "beta" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return ()

    return cause


def _at_start(code: str) -> Cause:
    """Make beta's Python run code at startup."""
    return _write("sitecustomize.py", code)


def _folder(package: str) -> Path:
    """The folder of a package, without importing it."""
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

#: Every fault, its kind, and the hosts to name.
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
        "connections are filtered, silently",
        "connections.filtered",
        "beta alpha",
        _filter("port1", "beta", UNUSED),
    ),
    Fault(
        "connections are filtered, with a refusal",
        "connections.filtered",
        "beta alpha",
        _filter("port1", "beta", UNUSED, "prohibit"),
    ),
    Fault(
        "the way back to the notebook is filtered",
        "connections.filtered",
        "here beta",
        _filter("port2", "head", UNUSED),
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
        "a name has an IPv6 address only",
        "names.unknown",
        "alpha beta",
        _do(lambda lab: lab.break_name("beta", "fd00::2", ["alpha"])),
    ),
    Fault("a password is needed", "ssh.password", "beta", _password),
    Fault("no ssh server", "ssh.refused", "beta", _ssh("Port 2223\n")),
    Fault("the host's key is unknown", "ssh.key", "beta", _ssh("UserKnownHostsFile none\n")),
    Fault("another Python", "python.differs", "beta", _at_start(_OLD)),
    Fault("another torch", "torch.differs", "beta", _at_start(_OLD_TORCH)),
    Fault("another distkit", "distkit.differs", "beta", _write(*_OLD_DISTKIT)),
    Fault("torch is missing", "torch.missing", "beta", _hide(_folder("torch"))),
    Fault("torch is broken", "torch.broken", "beta", _hide(_folder("torch") / "lib")),
    Fault("ipyparallel is missing", "ipyparallel.missing", "beta", _hide(_folder("ipyparallel"))),
    Fault("the folder is not shared", "folder.unshared", "beta", folder="/tmp"),
    Fault("the disk is full", "disk", "beta", _shrink("/tmp")),
    Fault("shared memory is full", "shm", "beta", _shrink("/dev/shm")),
    Fault(
        "little shared memory",
        "shm",
        "beta",
        _administer("beta", "mount -o remount,size=64m /dev/shm"),
    ),
)
