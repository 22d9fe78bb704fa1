"""Ask a probe on each machine, step by step, and collect the facts.

Every step has a time limit. A machine that does not answer is left out of the other steps, so a
dead host costs the time limit of ssh once.
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

from distkit.cluster import machine
from distkit.cluster.machine import own_address
from distkit.errors import DistkitError
from distkit.gone import refuse
from distkit_hosts.checkup import probe
from distkit_hosts.checkup.facts import HERE, Facts, Json
from distkit_hosts.checkup.report import Report
from distkit_hosts.clocks import PeerClock, RoundTrip

#: Time limits of ssh, and of the first answer [s].
CONNECT, FIRST = 5, 10.0

#: Time limit of any other answer [s].
PATIENCE = 3 * probe.PATIENCE

#: Time limit of the facts about a machine, which include two calls of nvidia-smi [s].
EXAMINE = 2 * machine.SMI_TIMEOUT + PATIENCE

#: The program sent to every machine.
SOURCE = "\f".join(Path(str(m.__file__)).read_text("utf-8") for m in (machine, probe))

#: Number of round trips to read a clock.
TRIPS = 20


def doctor(
    hosts: Sequence[str] = (),
    *,
    ssh_cmd: Sequence[str] = ("ssh",),
    ssh_args: Sequence[str] = (),
    python: str | None = None,
    say: Callable[[str], None] = lambda stage: None,
    **removed: Any,
) -> Report:
    """Examine this machine, or several and the connections between them, before ranks run there.

    It takes some seconds, and ten more if a host is dead.

    Args:
        hosts: other machines, each as ssh takes it: ``"alpha"``, ``"me@10.0.0.2"``.
        ssh_cmd: the program that reaches them, as in ipyparallel's launchers: ssh, or one that
            takes a host and a command line.
        ssh_args: its options, such as ``["-F", "lab.config"]``.
        python: the Python on the hosts; if not given, the path of this one, or else python3.
        say: called with the name of each step that begins.
        **removed: options of former versions, for their error messages.

    Raises:
        DistkitError: a host is named twice, or there is no ssh here.
        TypeError: an option was removed; the message says what to do instead.

    Example:
        >>> report = dk.hosts.doctor()                             # doctest: +SKIP
        >>> dk.hosts.doctor(hosts=["alpha", "beta"]).failures      # doctest: +SKIP
        []
    """
    refuse("dk.hosts.doctor", removed)
    labels = {host.rpartition("@")[2]: host for host in hosts}
    if len(labels) < len(hosts) or HERE in labels:
        raise DistkitError(f"hosts {', '.join(hosts)}: name each once, and none of them {HERE!r}.")
    if hosts and shutil.which(ssh_cmd[0]) is None:
        raise DistkitError(
            f"there is no {ssh_cmd[0]} here to reach hosts with. Install it (Debian: "
            "apt install openssh-client), or name another program as ssh_cmd."
        )
    enter, asks = [*ssh_cmd, *ssh_args], list[str]()
    if Path(ssh_cmd[0]).name == "ssh":  # not a stand-in
        asks = [*enter, "-G"]
        enter += ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT}"]
    pythons = [python] if python else [sys.executable, "python3", "python"]
    commands = {label: command(host, enter, pythons) for label, host in labels.items()}
    facts = Facts(targets={label: _target(host, asks) for label, host in labels.items()})
    _Examination(facts, say).run({HERE: own_command(), **commands})
    return Report(facts)


def _target(destination: str, asks: Sequence[str]) -> Json:
    """Return a host's name, and its name and port in the configuration of ssh."""
    name = destination.rpartition("@")[2]
    about = {"name": name, "door": name, "port": 22, "target": destination}
    if asks:
        ran = subprocess.run([*asks, destination], capture_output=True, text=True, timeout=CONNECT)
        known = dict(line.split(" ", 1) for line in ran.stdout.splitlines() if " " in line)
        about |= {"door": known.get("hostname", name), "port": int(known.get("port", 22))}
    return about


@dataclass
class _Examination:
    """The steps of an examination; each asks all machines at once."""

    facts: Facts
    say: Callable[[str], None]
    stage: str = ""
    #: The port on which each machine listens, or why it does not.
    listening: dict[str, int | str] = field(default_factory=dict)

    def run(self, commands: dict[str, list[str]]) -> None:
        """Run all steps."""
        between = ["names", "ports", "connections", "clocks", "files"] if self.facts.targets else []
        stages = ["machines", *between, "torch"]
        with Hosts(commands, self.lost) as self.hosts:
            if self.facts.targets:
                self.say("ssh")
            self.hosts.ask("clock", patience=FIRST)
            for stage in stages:
                self.stage = stage
                self.say(stage)
                getattr(self, stage)()

    def lost(self, label: str, words: str) -> None:
        """Record a machine that does not answer."""
        if label == HERE:
            raise DistkitError(
                f"this machine cannot be examined: {words}. Is {sys.executable} whole?"
            )
        self.facts.lost[label] = {"words": words, "stage": self.stage}

    def machines(self) -> None:
        """Ask each machine what it has."""
        self.facts.machines.update(self.hosts.ask("machine", patience=EXAMINE))

    def names(self) -> None:
        """Resolve every name on every machine, and choose the address of each host."""
        facts = self.facts
        name = facts.machines[HERE]["hostname"]
        facts.targets[HERE] = {"name": name, "door": name, "port": 0, "target": HERE}

        def names(asked: str) -> dict[str, str]:
            """Return the names to resolve; ssh may have other names here."""
            kind = "door" if asked == HERE else "name"
            return {label: about[kind] for label, about in facts.targets.items()}

        found = self.hosts.ask("resolve", lambda asked: {"names": list(names(asked).values())})
        for asked, known in found.items():
            facts.names[asked] = {label: known[name] for label, name in names(asked).items()}
        for label in facts.hosts:
            own = {*facts.machines[label]["addresses"]}
            told = [known[label].get("addresses", []) for known in facts.names.values()]
            facts.addresses[label] = choose([a for addresses in told for a in addresses], own)

    def ports(self) -> None:
        """Let every machine listen at its address, and nowhere else."""
        addresses, secret = self.facts.addresses, secrets.token_hex(16)
        addresses[HERE] = _source(next(iter(addresses.values()), ""))
        self.listening = self.hosts.ask(
            "listen", lambda label: {"address": addresses[label], "secret": secret}
        )

    def others(self, label: str) -> list[str]:
        """Return the other machines that still answer."""
        return [other for other in self.hosts.alive if other != label]

    def peers(self, a: str) -> dict[str, list[int | str]]:
        """Return the address and port of each machine that a connects to."""
        found = {b: self.listening.get(b) for b in self.others(a)}
        return {b: [self.facts.addresses[b], p] for b, p in found.items() if isinstance(p, int)}

    def connections(self) -> None:
        """Connect from every machine to every other, and send datagrams, which need no answer."""
        ways = self.facts.ways
        ways.update({a: {b: {} for b in self.others(a)} for a in self.hosts.alive})
        for a, answers in self.hosts.ask("reach", lambda a: {"peers": self.peers(a)}).items():
            for b in self.others(a):
                ways[a][b]["tcp"] = answers.get(b, f"cannot listen: {self.listening.get(b)}")
        self.hosts.ask("shout", lambda a: {"name": a, "peers": self.peers(a)})
        heard = self.hosts.ask(
            "heard", lambda b: {"names": self.others(b), "within": probe.PATIENCE / 2}
        )
        for b, arrived in heard.items():
            for a in self.others(b):
                ways[a][b]["arrived"] = a in arrived

    def clocks(self) -> None:
        """Read every clock by round trips."""
        found = self.hosts.each(read_clock)
        self.facts.clocks.update({label: c for label, c in found.items() if label != HERE})

    def files(self) -> None:
        """Look on every machine for a file in this home, and in this folder."""
        with ExitStack() as stack:
            marks = {}
            for kind, folder in (("home", Path.home()), ("folder", Path.cwd())):
                with suppress(OSError):  # no permission to write there
                    file = stack.enter_context(
                        tempfile.NamedTemporaryFile("w", prefix=".distkit-doctor-", dir=folder)
                    )
                    file.write(file.name)
                    file.flush()
                    marks[kind] = (str(folder), file.name)
            files = {name: name for _, name in marks.values()}
            found = self.hosts.ask("see", lambda label: {"files": files})
        for kind, (path, name) in marks.items():
            seen = {label: there[name] for label, there in found.items()}
            self.facts.shared[kind] = {"path": path, "seen": seen}

    def torch(self) -> None:
        """Import torch everywhere."""
        for label, found in self.hosts.ask("torch", patience=probe.IMPORT + PATIENCE).items():
            self.facts.machines[label]["torch"] = found


def _source(address: str) -> str:
    """Return the address of this machine from which packets to another one come."""
    try:
        return own_address(address)
    except OSError:
        return "127.0.0.1"


def choose(told: Sequence[str], own: set[str]) -> str:
    """Return an address of a machine: preferably one of its own to which others resolve its name.

    >>> choose(["127.0.1.1", "10.0.0.9", "10.0.0.2"], {"127.0.0.1", "10.0.0.2", "10.1.0.2"})
    '10.0.0.2'
    >>> choose([], {"127.0.0.1", "10.0.0.2"})
    '10.0.0.2'
    """
    candidates = [a for a in told if a in own] + sorted(own)
    outside = [a for a in candidates if not a.startswith("127.")]
    return next(iter(outside or candidates), "127.0.0.1")


def read_clock(host: Host) -> tuple[float, float]:
    """Return a machine's clock minus this one's, and the error of that [s]."""
    clock = PeerClock()
    for _trip in range(TRIPS):
        before = time()
        theirs = host.ask("clock", PATIENCE)
        clock.add(RoundTrip(before, theirs, theirs, time()))
    assert clock.offset is not None
    return clock.offset.seconds, clock.offset.error


# -- probes -------------------------------------------------------------------------------------


class Lost(Exception):
    """A host does not answer; the message is that of ssh or of the probe."""


class Host:
    """The probe on one machine.

    Args:
        label: the name of the host in checks.
        command: the command that starts the probe, which reads requests from its input.
    """

    def __init__(self, label: str, command: Sequence[str]) -> None:
        self.label = label
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that Ctrl-C does not end it
        )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()
        self._say(SOURCE)

    def ask(self, do: str, patience: float, **given: Any) -> Any:
        """Send a request, and wait up to ``patience`` seconds for the answer.

        Raises:
            Lost: there is no answer.
        """
        self._say(json.dumps({"do": do, **given}) + "\n")
        try:
            text = self._answers.get(timeout=patience)
        except queue.Empty:
            raise Lost(f"no answer within {patience:g} s") from None
        if text is None:
            code = self._process.wait()
            raise Lost(self._said.rstrip(".") or f"it ended with exit status {code}")
        answer = json.loads(text)
        if "error" in answer:
            raise Lost(answer["error"])
        return answer["answer"]

    def _say(self, text: str) -> None:
        with suppress(OSError):  # it has ended, which the next request reports
            self._to.write(text)
            self._to.flush()

    def _hear(self) -> None:
        for line in self._from:
            if line.startswith(probe.MARK):
                self._answers.put(line[len(probe.MARK) :])
            elif not line.startswith("Warning: "):
                self._said = line.strip() or self._said
        self._answers.put(None)

    def close(self) -> None:
        """End the probe."""
        self._process.kill()
        self._process.wait()
        self._thread.join(1)
        self._from.close()
        with suppress(OSError):  # unread requests
            self._to.close()


class Hosts:
    """The probes of several machines, without those that have stopped answering.

    Args:
        commands: the command that starts the probe of each machine, by label.
        lost: called with the label of a machine that does not answer, and the message.
    """

    def __init__(self, commands: dict[str, list[str]], lost: Callable[[str, str], None]) -> None:
        self._lost, self._pool = lost, ThreadPoolExecutor(len(commands))
        self._all = [Host(label, command) for label, command in commands.items()]
        self.alive = {host.label: host for host in self._all}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        list(self._pool.map(Host.close, self._all))
        self._pool.shutdown()

    def ask(
        self,
        do: str,
        given: Callable[[str], Json] = lambda label: {},
        patience: float = PATIENCE,
    ) -> dict[str, Any]:
        """Send a request to all machines, and return their answers by label."""
        return self.each(lambda host: host.ask(do, patience, **given(host.label)))

    def each(self, work: Callable[[Host], Any]) -> dict[str, Any]:
        """Call a function with each probe at once, and return the results by label."""
        results: dict[str, Any] = {}

        def one(host: Host) -> None:
            try:
                results[host.label] = work(host)
            except Lost as error:
                del self.alive[host.label]
                self._lost(host.label, str(error))

        list(self._pool.map(one, list(self.alive.values())))
        return {label: results[label] for label in self.alive}


def command(destination: str, ssh: Sequence[str], pythons: Sequence[str]) -> list[str]:
    """Return the command that starts a probe on another machine, by the first Python found there.

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
