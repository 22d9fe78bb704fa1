"""Query a probe on each machine, step by step, and collect the facts.

Every step has a time limit. A machine that does not respond is excluded from later steps, so a
dead host delays the examination only once.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster import machine
from distkit.cluster.machine import local_address
from distkit.errors import DistkitError
from distkit_hosts.checkup import probe
from distkit_hosts.checkup.checks import Report
from distkit_hosts.checkup.facts import HERE, Facts, Json

#: Timeout for ssh to connect, and timeout for a probe's first reply [s].
CONNECT_TIMEOUT, FIRST_REPLY_TIMEOUT = 5, 10.0

#: Timeout for most other replies [s].
REPLY_TIMEOUT = 3 * probe.TIMEOUT

#: Timeout for the description of a machine [s]; to describe it, the probe calls nvidia-smi.
MACHINE_TIMEOUT = 2 * machine.SMI_TIMEOUT + REPLY_TIMEOUT

#: The program sent to every machine.
SOURCE = "\f".join(Path(str(m.__file__)).read_text("utf-8") for m in (machine, probe))


def doctor(
    hosts: Sequence[str] = (),
    *,
    ssh_cmd: Sequence[str] = ("ssh",),
    python: str | None = None,
) -> Report:
    """Examine this machine, or several and the connections between them, before ranks run there.

    The examination takes a few seconds, plus ten seconds if a host is down.

    Args:
        hosts: other machines, each named as for ssh: ``"alpha"``, ``"me@10.0.0.2"``.
        ssh_cmd: the command that connects to them, as for ipyparallel launchers: ssh, optionally
            with options, such as ``["ssh", "-F", "lab.config"]``, or another program that accepts a
            host and a command line.
        python: the path of Python on the hosts; by default, the path of this process's Python if it
            exists there, otherwise python3 or python.

    Raises:
        DistkitError: a host is named twice or "here", ssh is not installed here, or this machine
            cannot be examined.

    Example:
        >>> report = dk.hosts.doctor()                             # doctest: +SKIP
        >>> dk.hosts.doctor(hosts=["alpha", "beta"]).failures      # doctest: +SKIP
        []
    """
    labels = {host.rpartition("@")[2]: host for host in hosts}
    if len(labels) < len(hosts) or HERE in labels:
        raise DistkitError(f"hosts {', '.join(hosts)}: name each once, and do not name {HERE!r}.")
    if hosts and shutil.which(ssh_cmd[0]) is None:
        raise DistkitError(
            f"{ssh_cmd[0]} is not installed here, so no host can be reached. Install it (Debian: "
            "apt install openssh-client), or pass another program as ssh_cmd."
        )
    ssh = [*ssh_cmd]
    if Path(ssh_cmd[0]).name == "ssh":  # other programs may lack these options
        ssh += ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_TIMEOUT}"]
    pythons = [python] if python else [sys.executable, "python3", "python"]
    commands = {label: command(host, ssh, pythons) for label, host in labels.items()}
    facts = Facts(targets=labels)
    _Examination(facts, {HERE: own_command(), **commands}).run()
    return Report(facts)


class _Examination:
    """The steps of an examination; each step queries all machines concurrently.

    Args:
        facts: receives the replies.
        commands: the command that starts the probe on each machine, by label.
    """

    def __init__(self, facts: Facts, commands: dict[str, list[str]]) -> None:
        self.facts, self.stage = facts, ""
        #: The listening port of each machine.
        self.listening_ports: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(len(commands))
        self._probes = [Host(label, command) for label, command in commands.items()]
        #: The probes that still respond.
        self.alive = {host.label: host for host in self._probes}

    def run(self) -> None:
        """Run all steps and stop the probes."""
        cross_host = ["names", "ports", "connections", "files"] if self.facts.targets else []
        try:
            self.ask("start", timeout=FIRST_REPLY_TIMEOUT)
            for stage in ["machines", *cross_host, "torch"]:
                self.stage = stage
                getattr(self, stage)()
        finally:
            list(self._pool.map(Host.close, self._probes))
            self._pool.shutdown()

    def ask(
        self,
        do: str,
        arguments: Callable[[str], Json] = lambda label: {},
        timeout: float = REPLY_TIMEOUT,
    ) -> dict[str, Any]:
        """Send a request to all machines concurrently and return their replies by label."""
        replies: dict[str, Any] = {}

        def send(host: Host) -> None:
            try:
                replies[host.label] = host.ask(do, timeout, **arguments(host.label))
            except ProbeError as error:
                del self.alive[host.label]
                self.facts.lost[host.label] = {"message": str(error), "stage": self.stage}

        list(self._pool.map(send, list(self.alive.values())))
        if HERE in self.facts.lost:
            raise DistkitError(
                f"this machine cannot be examined: {self.facts.lost[HERE]['message']}. Check "
                f"whether {sys.executable} works."
            )
        return {label: replies[label] for label in self.alive}

    def machines(self) -> None:
        """Query the properties of each machine."""
        self.facts.machines.update(self.ask("machine", timeout=MACHINE_TIMEOUT))

    def names(self) -> None:
        """Resolve every name on every machine and choose the address of each host."""
        facts = self.facts
        facts.names = self.ask("resolve", lambda host: {"names": [*facts.targets]})
        for label in facts.hosts:
            local = {*facts.machines[label]["addresses"]}
            resolved = [reply[label].get("addresses", []) for reply in facts.names.values()]
            facts.addresses[label] = choose([a for addresses in resolved for a in addresses], local)

    def ports(self) -> None:
        """Make every machine listen on its own address only."""
        addresses, secret = self.facts.addresses, secrets.token_hex(16)
        addresses[HERE] = _source(next(iter(addresses.values()), ""))
        self.listening_ports = self.ask(
            "listen", lambda label: {"address": addresses[label], "secret": secret}
        )

    def others(self, label: str) -> list[str]:
        """Return the other machines that still respond."""
        return [other for other in self.alive if other != label]

    def peers(self, a: str) -> dict[str, tuple[str, int]]:
        """Return the address and port of each machine that machine ``a`` connects to."""
        return {b: (self.facts.addresses[b], self.listening_ports[b]) for b in self.others(a)}

    def connections(self) -> None:
        """Connect every machine to every other, and send datagrams, which need no reply."""
        connections = self.facts.connections
        connections.update({a: {b: {} for b in self.others(a)} for a in self.alive})
        for a, replies in self.ask("reach", lambda a: {"peers": self.peers(a)}).items():
            for b, error in replies.items():
                connections[a][b]["tcp"] = error
        self.ask("send_datagrams", lambda a: {"name": a, "peers": self.peers(a)})
        received = self.ask(
            "receive_datagrams", lambda b: {"names": self.others(b), "within": probe.TIMEOUT / 2}
        )
        for b, arrived in received.items():
            for a in self.others(b):
                connections[a][b]["arrived"] = a in arrived

    def files(self) -> None:
        """Check whether each machine can read a file in this folder."""
        folder = self.facts.folder = str(Path.cwd())
        with (
            suppress(OSError),  # the folder is not writable
            tempfile.NamedTemporaryFile("w", prefix=".distkit-doctor-", dir=folder) as file,
        ):
            file.write(file.name)
            file.flush()
            self.facts.folder_visible = self.ask("has_file", lambda host: {"path": file.name})

    def torch(self) -> None:
        """Import torch everywhere."""
        for label, torch in self.ask("torch", timeout=probe.IMPORT_TIMEOUT + REPLY_TIMEOUT).items():
            self.facts.machines[label]["torch"] = torch


def _source(address: str) -> str:
    """Return the source address of packets from this machine to another."""
    try:
        return local_address(address)
    except OSError:
        return "127.0.0.1"


def choose(resolved: Sequence[str], own: set[str]) -> str:
    """Return an address of a machine, preferably one that other machines resolve its name to.

    >>> choose(["127.0.1.1", "10.0.0.9", "10.0.0.2"], {"127.0.0.1", "10.0.0.2", "10.1.0.2"})
    '10.0.0.2'
    >>> choose([], {"127.0.0.1", "10.0.0.2"})
    '10.0.0.2'
    """
    candidates = [a for a in resolved if a in own] + sorted(own)
    external = [a for a in candidates if not a.startswith("127.")]
    return next(iter(external or candidates), "127.0.0.1")


# -- probes -------------------------------------------------------------------------------------


class ProbeError(Exception):
    """A probe failed or did not respond; the message may quote ssh or the probe."""


class Host:
    """The probe on one machine.

    Args:
        label: the name of the host in checks.
        command: the command that starts the probe, which reads requests from standard input.
    """

    def __init__(self, label: str, command: Sequence[str]) -> None:
        self.label = label
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._last_line = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that Ctrl-C does not kill it
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._read_output, daemon=True)
        self._thread.start()
        self._write(SOURCE)

    def ask(self, do: str, timeout: float, **arguments: Any) -> Any:
        """Send a request and wait up to ``timeout`` seconds for the reply.

        Raises:
            ProbeError: the probe fails or does not respond.
        """
        self._write(json.dumps({"do": do, **arguments}) + "\n")
        try:
            text = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise ProbeError(f"no reply within {timeout:g} s") from None
        if text is None:
            raise ProbeError(
                self._last_line.rstrip(".") or f"it exited with status {self._process.wait()}"
            )
        reply = json.loads(text)
        if "error" in reply:
            raise ProbeError(reply["error"])
        return reply["reply"]

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the probe has exited, which the next request reports
            self._stdin.write(text)
            self._stdin.flush()

    def _read_output(self) -> None:
        for line in self._stdout:
            if line.startswith(probe.MARK):
                self._replies.put(line[len(probe.MARK) :])
            elif not line.startswith("Warning: "):
                self._last_line = line.strip() or self._last_line
        self._replies.put(None)

    def close(self) -> None:
        """Stop the probe."""
        self._process.kill()
        self._process.wait()
        self._thread.join(1)
        self._stdout.close()
        with suppress(OSError):  # unread requests
            self._stdin.close()


def command(destination: str, ssh: Sequence[str], pythons: Sequence[str]) -> list[str]:
    """Return the command that starts a probe on another machine, with the first Python found there.

    >>> command("me@alpha", ["ssh"], ["python3"])[:2]
    ['ssh', 'me@alpha']
    """
    names = " ".join(map(shlex.quote, pythons))
    start = f'exec "$p" -uc {shlex.quote(probe.START)} {len(SOURCE)}'
    script = (
        f'for p in {names}; do command -v "$p" >/dev/null 2>&1 && {start}; done; '
        f'echo "no Python: {names}" >&2; exit 127'
    )
    return [*ssh, destination, f"exec sh -c {shlex.quote(script)}"]


def own_command() -> list[str]:
    """Return the command that starts a probe here, with this process's import path."""
    path = os.pathsep.join(filter(None, sys.path))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-uc", probe.START, str(len(SOURCE))]
