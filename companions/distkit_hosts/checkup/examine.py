"""Examines machines: asks a probe on each, step by step, and collects the facts.

Every step has a time limit, and a machine that does not answer is left out of the rest: a dead
host costs the limit of ssh, once.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

from distkit.errors import DistkitError
from distkit_hosts.checkup import probe
from distkit_hosts.checkup.facts import HERE, Facts, Json
from distkit_hosts.checkup.hosts import CONNECT, FIRST, PATIENCE, Host, Hosts, command, own_command
from distkit_hosts.checkup.ways import ANY, SMALL

#: Messages that are measured [bytes], and for how long on each way at most and at least [s].
SIZES = (1, 1 << 8, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
LONGEST, SHORTEST = 0.6, 0.15

#: All ways together are measured for about so long [s].
MEASURING = 6.0

#: Round trips by which a clock is read.
TRIPS = 20

#: Importing torch may take so long, cold, from a network disk [s].
IMPORT = 25.0

#: Frames larger than this are not tried: no network card makes them [bytes].
JUMBO = 9216


@dataclass(frozen=True)
class Reach:
    """How hosts are reached.

    Args:
        ssh_cmd: the program, as in ipyparallel's launchers; it gets the host and a command line.
        ssh_args: its options.
        python: the Python of the hosts; where none is named: this one, if it is there, or python3.
    """

    ssh_cmd: Sequence[str] = ("ssh",)
    ssh_args: Sequence[str] = ()
    python: str | None = None

    @property
    def is_ssh(self) -> bool:
        """True if it is ssh itself, not a stand-in."""
        return Path(self.ssh_cmd[0]).name == "ssh"

    def command(self, destination: str) -> list[str]:
        """What starts a probe on a host."""
        options = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT}"] if self.is_ssh else []
        pythons = [self.python] if self.python else [sys.executable, "python3", "python"]
        return command(destination, [*self.ssh_cmd, *options, *self.ssh_args], pythons)

    def target(self, destination: str) -> Json:
        """A host's name, and the name and port that ssh's configuration has for it here."""
        name = destination.rpartition("@")[2]
        door, port = name, 22
        if self.is_ssh:
            asked = [*self.ssh_cmd, *self.ssh_args, "-G", destination]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=CONNECT).stdout
            known = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
            door, port = known.get("hostname", name), int(known.get("port", port))
        return {"name": name, "door": door, "port": port, "target": destination}


def alone() -> Facts:
    """The facts about this machine."""
    with Hosts({HERE: own_command()}, _unable) as hosts:
        machines = hosts.ask("machine", patience=FIRST)
        torch = hosts.ask("torch", patience=IMPORT)
    return Facts({HERE: {**machines[HERE], "torch": torch[HERE]}})


def _unable(label: str, words: str) -> None:
    raise DistkitError(f"this machine cannot be examined: {words}. Is {sys.executable} whole?")


def several(
    hosts: Sequence[str],
    reach: Reach,
    ports: Sequence[int] = (),
    say: Callable[[str], None] = lambda stage: None,
) -> Facts:
    """The facts about this machine, these hosts, and the ways between them.

    Args:
        hosts: each as ssh takes it: a name, an address, user@host.
        reach: how they are reached.
        ports: tried beside any.
        say: told what is going on.

    Raises:
        DistkitError: there is nothing to reach hosts with, or one is named twice.
    """
    labels = {host.rpartition("@")[2]: host for host in hosts}
    if len(labels) < len(hosts) or HERE in labels:
        raise DistkitError(f"hosts {', '.join(hosts)}: name each once, and none of them {HERE!r}.")
    if shutil.which(reach.ssh_cmd[0]) is None:
        raise DistkitError(
            f"there is no {reach.ssh_cmd[0]} here to reach hosts with. Install it (Debian: "
            "apt install openssh-client), or name another program as ssh_cmd."
        )
    targets = {label: reach.target(host) for label, host in labels.items()}
    commands = {label: reach.command(host) for label, host in labels.items()}
    examination = _Examination(Facts(targets=targets, ports=tuple(ports)), say)
    examination.run({HERE: own_command(), **commands})
    return examination.facts


@dataclass
class _Examination:
    """The steps, one after the other; each asks all machines at once."""

    facts: Facts
    say: Callable[[str], None]
    stage: str = ""
    #: The address of this machine as each host sees it.
    sources: dict[str, str] = field(default_factory=dict)
    #: The ports on which each machine listens, by address and by what was asked for.
    listening: dict[str, dict[str, Json]] = field(default_factory=dict)

    def run(self, commands: dict[str, list[str]]) -> None:
        """All steps."""
        facts = self.facts
        with Hosts(commands, self.lost) as self.hosts:
            self.say("machines")
            facts.machines.update(self.hosts.ask("machine", patience=FIRST))
            for stage, step in self._steps():
                self.stage = stage
                self.say(stage)
                step()

    def _steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "names", self.names
        yield "ports", self.listen
        yield "connections", self.connect
        yield "frames", self.shout
        yield "clocks", self.clocks
        yield "files", self.files
        yield "links", self.measure
        yield "torch", self.torch

    def lost(self, label: str, words: str) -> None:
        """Note a machine that does not answer."""
        if label == HERE:
            _unable(label, words)
        self.facts.lost[label] = {"words": words, "stage": self.stage}

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
        facts.names = {
            asked: {label: known[name] for label, name in names(asked).items()}
            for asked, known in found.items()
        }
        for label in facts.hosts:
            own = {i["address"] for i in facts.machines[label]["interfaces"].values()}
            told = [known[label].get("addresses", []) for known in facts.names.values()]
            facts.addresses[label] = choose([a for addresses in told for a in addresses], own)

    def listen(self) -> None:
        """Let every machine listen where the others look for it, and on nothing else."""
        facts, secret = self.facts, secrets.token_hex(16)
        self.sources = self._routes()
        ours = sorted(set(self.sources.values()))
        facts.addresses[HERE] = next(iter(ours), "127.0.0.1")

        def where(label: str) -> Json:
            addresses = ours if label == HERE else [facts.addresses[label]]
            return {"addresses": addresses, "ports": [0, *facts.ports], "secret": secret}

        self.listening = self.hosts.ask("listen", where)
        ways = self.hosts.ask(
            "route", lambda a: {"addresses": [self.address(a, b) for b in self.others(a)]}
        )
        for a, found in ways.items():
            facts.ways[a] = {b: {"tcp": {}, **found[self.address(a, b)]} for b in self.others(a)}

    def _routes(self) -> dict[str, str]:
        """The address that packets from here to each host come from."""
        facts = self.facts
        asked = [facts.addresses[label] for label in facts.hosts]
        found = self.hosts.ask(
            "route", lambda label: {"addresses": asked} if label == HERE else None
        )
        known = {address: way.get("source", "127.0.0.1") for address, way in found[HERE].items()}
        return {label: known[facts.addresses[label]] for label in facts.hosts}

    def others(self, label: str) -> list[str]:
        """The other machines that still answer."""
        return [other for other in self.hosts.alive if other != label]

    def address(self, a: str, b: str) -> str:
        """The address by which a is to find b."""
        return self.sources[a] if b == HERE else self.facts.addresses[b]

    def port(self, a: str, b: str, port: str = ANY) -> Any:
        """The port of b that a is to try, or the words that say why there is none."""
        return self.listening.get(b, {}).get(self.address(a, b), {}).get(port, "is not there")

    def connect(self) -> None:
        """Connect from every machine to every other."""
        for port in (0, *self.facts.ports):
            self._connect(str(port))
        self._knock()

    def _connect(self, port: str) -> None:
        def peers(a: str) -> Json:
            numbers = {b: self.port(a, b, port) for b in self.others(a)}
            return {b: [self.address(a, b), n] for b, n in numbers.items() if isinstance(n, int)}

        found = self.hosts.ask("reach", lambda a: {"peers": peers(a)})
        for a, answers in found.items():
            for b in self.others(a):
                why = answers.get(b, f"cannot listen: {self.port(a, b, port)}")
                self.facts.ways[a][b]["tcp"][port] = why

    def _knock(self) -> None:
        """Ask everybody whether a lost host's ssh server answers."""
        facts = self.facts
        doors = {}
        for label in facts.lost:
            known = facts.names.get(HERE, {}).get(label, {}).get("addresses")
            if known:
                doors[label] = [known[0], facts.targets[label]["port"]]
        found = self.hosts.ask("knock", lambda a: {"peers": doors} if doors else None)
        for label in doors:
            if seen := [a for a, answers in found.items() if answers[label]]:
                facts.knocked[label] = seen

    def shout(self) -> None:
        """Send small and large datagrams from every machine to every other."""
        facts = self.facts

        def large(a: str, b: str) -> int:
            return min(facts.way(a, b).get("mtu") or 1500, JUMBO) - probe.HEADERS

        def peers(a: str) -> Json:
            return {
                b: [self.address(a, b), number, [SMALL, large(a, b)]]
                for b in self.others(a)
                if isinstance(number := self.port(a, b), int)
            }

        sent = self.hosts.ask("shout", lambda a: {"name": a, "peers": peers(a)})
        heard = self.hosts.ask(
            "heard",
            lambda b: {
                "wanted": {a: [SMALL, large(a, b)] for a in self.others(b)},
                "within": probe.PATIENCE / 2,
            },
        )
        for a, said in sent.items():
            for b, sizes in said.items():
                arrived = heard.get(b, {}).get(a, [])
                facts.ways[a][b].update(sent=sizes, arrived=arrived)

    def clocks(self) -> None:
        """Read every clock by round trips."""
        found = self.hosts.each(read_clock, lambda label: None if label == HERE else {})
        self.facts.clocks = {label: offset for label, offset in found.items()}

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

    def measure(self) -> None:
        """Measure latency and bandwidth of every way; at one time each machine has one way."""
        facts = self.facts
        open_ways = [w for w in facts.ordered() if facts.way(*w).get("tcp", {}).get(ANY) == ""]
        rounds = list(tournament(open_ways))
        seconds = min(LONGEST, max(SHORTEST, MEASURING / max(1, len(rounds))))
        for ways in rounds:
            self._measure({a: b for a, b in ways if {a, b} <= set(self.hosts.alive)}, seconds)

    def _measure(self, to: dict[str, str], seconds: float) -> None:
        def way(a: str) -> Json | None:
            if a not in to:
                return None
            end = {"address": self.address(a, to[a]), "port": self.port(a, to[a])}
            return {**end, "sizes": SIZES, "seconds": seconds}

        found = self.hosts.ask("measure", way, PATIENCE + 2 * LONGEST)
        for a, samples in found.items():
            self.facts.ways[a][to[a]].update(samples)

    def torch(self) -> None:
        """Import torch everywhere."""
        for label, found in self.hosts.ask("torch", patience=IMPORT).items():
            self.facts.machines[label]["torch"] = found


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


def tournament(ways: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Rounds in which every machine has one way at most.

    >>> list(tournament([("a", "b"), ("b", "a"), ("c", "d")]))
    [[('a', 'b'), ('c', 'd')], [('b', 'a')]]
    """
    left = list(ways)
    while left:
        busy: set[str] = set()
        now = []
        for way in left:
            if not busy & set(way):
                busy |= set(way)
                now.append(way)
        left = [way for way in left if way not in now]
        yield now


def read_clock(host: Host, _: Json) -> tuple[float, float]:
    """How far a machine's clock is ahead of this one, and the error of that [s].

    The quickest of some round trips counts: the true offset is within half of it.
    """
    best = (0.0, float("inf"))
    for _trip in range(TRIPS):
        before = time()
        theirs, _ = host.ask("clock", PATIENCE)
        after = time()
        best = min(best, (theirs - (before + after) / 2, (after - before) / 2), key=lambda x: x[1])
    return best
