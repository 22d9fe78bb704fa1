"""The doctor: asks a probe on each machine, step by step, and collects the facts.

Every step has a time limit, and a machine that does not answer is left out of the rest: a dead
host costs the limit of ssh, once.
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

#: ssh gives up after this long; the first answer takes at most this long [s].
CONNECT, FIRST = 5, 10.0

#: Any other answer takes at most this long [s].
PATIENCE = 3 * probe.PATIENCE

#: A machine's GPUs are found by two calls of nvidia-smi; all facts about it take at most this [s].
EXAMINE = 2 * machine.SMI_TIMEOUT + PATIENCE

#: What is sent to every machine.
SOURCE = "\f".join(Path(str(m.__file__)).read_text("utf-8") for m in (machine, probe))

#: Round trips by which a clock is read.
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
    """Examine this machine, or several and the ways between them, before ranks run there.

    It takes seconds: a dead host costs ten.

    Args:
        hosts: other machines, each as ssh takes it: ``"alpha"``, ``"me@10.0.0.2"``.
        ssh_cmd: what reaches them, as in ipyparallel's launchers: ssh, or a program that takes a
            host and a command line.
        ssh_args: its options, such as ``["-F", "lab.config"]``.
        python: the Python on the hosts; if not given, this one where it is there, or python3.
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
    """A host's name, and the name and port that ssh's configuration has for it here."""
    name = destination.rpartition("@")[2]
    about = {"name": name, "door": name, "port": 22, "target": destination}
    if asks:
        ran = subprocess.run([*asks, destination], capture_output=True, text=True, timeout=CONNECT)
        known = dict(line.split(" ", 1) for line in ran.stdout.splitlines() if " " in line)
        about |= {"door": known.get("hostname", name), "port": int(known.get("port", 22))}
    return about


@dataclass
class _Examination:
    """The steps, one after the other; each asks all machines at once."""

    facts: Facts
    say: Callable[[str], None]
    stage: str = ""
    #: The port on which each machine listens, or why it does not.
    listening: dict[str, int | str] = field(default_factory=dict)

    def run(self, commands: dict[str, list[str]]) -> None:
        """All steps."""
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
        """Note a machine that does not answer."""
        if label == HERE:
            raise DistkitError(
                f"this machine cannot be examined: {words}. Is {sys.executable} whole?"
            )
        self.facts.lost[label] = {"words": words, "stage": self.stage}

    def machines(self) -> None:
        """What each machine has."""
        self.facts.machines.update(self.hosts.ask("machine", patience=EXAMINE))

    def names(self) -> None:
        """Who knows whom by which address; and the address that counts."""
        facts = self.facts
        name = facts.machines[HERE]["hostname"]
        facts.targets[HERE] = {"name": name, "door": name, "port": 0, "target": HERE}

        def names(asked: str) -> dict[str, str]:
            """Here ssh may have other names for hosts."""
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
        """Let every machine listen where the others look for it, and on nothing else."""
        addresses, secret = self.facts.addresses, secrets.token_hex(16)
        addresses[HERE] = _source(next(iter(addresses.values()), ""))
        self.listening = self.hosts.ask(
            "listen", lambda label: {"address": addresses[label], "secret": secret}
        )

    def others(self, label: str) -> list[str]:
        """The other machines that still answer."""
        return [other for other in self.hosts.alive if other != label]

    def peers(self, a: str) -> dict[str, list[int | str]]:
        """The address and port of each machine that a is to reach."""
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
        """Look from everywhere for a file in this home, and in this folder."""
        with ExitStack() as stack:
            marks = {}
            for kind, folder in (("home", Path.home()), ("folder", Path.cwd())):
                with suppress(OSError):  # one may not write there
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
    """The address that packets from here to another come from."""
    try:
        return own_address(address)
    except OSError:
        return "127.0.0.1"


def choose(told: Sequence[str], own: set[str]) -> str:
    """The address of a machine that counts: one that others have heard of and that is its own.

    >>> choose(["127.0.1.1", "10.0.0.9", "10.0.0.2"], {"127.0.0.1", "10.0.0.2", "10.1.0.2"})
    '10.0.0.2'
    >>> choose([], {"127.0.0.1", "10.0.0.2"})
    '10.0.0.2'
    """
    candidates = [a for a in told if a in own] + sorted(own)
    outside = [a for a in candidates if not a.startswith("127.")]
    return next(iter(outside or candidates), "127.0.0.1")


def read_clock(host: Host) -> tuple[float, float]:
    """A machine's clock minus this one's, and the error of that [s]."""
    clock = PeerClock()
    for _trip in range(TRIPS):
        before = time()
        theirs = host.ask("clock", PATIENCE)
        clock.add(RoundTrip(before, theirs, theirs, time()))
    assert clock.offset is not None
    return clock.offset.seconds, clock.offset.error


# -- probes -------------------------------------------------------------------------------------


class Lost(Exception):
    """A host that does not answer; the words are ssh's, or the probe's."""


class Host:
    """The probe on one machine.

    Args:
        label: what the host is called in findings.
        command: what starts the probe: it reads requests from its input.
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
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()
        self._say(SOURCE)

    def ask(self, do: str, patience: float, **given: Any) -> Any:
        """Ask, and wait this many seconds for the answer.

        Raises:
            Lost: there is none.
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
        with suppress(OSError):  # it has ended: that is told when it is asked
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
        with suppress(OSError):  # it has not read all
            self._to.close()


class Hosts:
    """Several machines that are asked at once; those that do not answer are left out from then on.

    Args:
        commands: what starts the probe of each, by label.
        lost: called with each that is left out: its label, and the words.
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
        """Ask all, with what is given for each; the answers, by label."""
        return self.each(lambda host: host.ask(do, patience, **given(host.label)))

    def each(self, work: Callable[[Host], Any]) -> dict[str, Any]:
        """Work with all; the results, by label."""
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
    """What starts a probe on another machine, with the first of these Pythons that is there.

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
    """What starts a probe here, where it finds what this process finds."""
    path = os.pathsep.join(filter(None, sys.path))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-uc", probe.START, str(len(SOURCE))]
