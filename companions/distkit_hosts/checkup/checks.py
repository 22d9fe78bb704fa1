"""Checks of machines, their connections and their differences. No side effects."""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations

from distkit._format import count, human_bytes, joined
from distkit.cluster.plan import RANK_BYTES, Gpus, assign_devices
from distkit.cluster.processes import cleanup
from distkit_hosts.checkup.facts import (
    HERE,
    Check,
    Facts,
    Json,
    Level,
    cores,
    failure,
    gpus,
    named,
    on,
    passed,
    recommended_ranks,
    warning,
)

#: The default size of a Docker container's shared memory [bytes].
SMALL_SHM = 64 << 20

#: Minimum free space of /dev/shm [bytes].
MIN_FREE_SHM = 1 << 20

#: The packages that ranks need.
NEEDED = ("torch", "ipyparallel", "distkit")


def host_checks(host: str, machine: Json) -> Iterator[Check]:
    """Yield every check of one machine."""
    for check in (_memory, _space, _packages, _gpus):
        yield from check(host, machine)


def _memory(host: str, machine: Json) -> Iterator[Check]:
    free, n = human_bytes(machine["memory"]["free"]), recommended_ranks(machine)
    if n:
        text = f"{count(cores(machine), 'core')}, {free} of memory free"
        yield passed("ranks", f"{text}: up to {count(n, 'rank')} {on(host)}", host)
    else:
        yield failure(
            "memory",
            f"only {free} of memory is free {on(host)}; a rank needs {human_bytes(RANK_BYTES)}.",
            "Stop other programs there, or raise the container's memory limit.",
            host,
        )


def _space(host: str, machine: Json) -> Iterator[Check]:
    shm, temporary = machine["shm"], machine["temporary"]
    if problem := _problem(shm, MIN_FREE_SHM):
        yield failure(
            "shm",
            f"/dev/shm {on(host)}, which ranks use for shared memory, {problem}.",
            "Mount it (mount -t tmpfs tmpfs /dev/shm), or remove files there.",
            host,
        )
    elif shm["size"] <= SMALL_SHM:
        yield warning(
            "shm",
            f"/dev/shm {on(host)} has only {human_bytes(shm['size'])}, a container's default: data "
            "loaders and shared-memory collectives quickly fill it.",
            "Start the container with --shm-size=2g.",
            host,
        )
    need = cleanup.space_needed(max(1, recommended_ranks(machine)))
    if problem := _problem(temporary, need):
        yield failure(
            "disk",
            f"the temporary folder {temporary['path']} {on(host)} {problem}.",
            f"Free {human_bytes(need)} there, or set TMPDIR to another folder.",
            host,
        )


def _problem(space: Json, need: int) -> str:
    """Describe a file system's problem as a clause; "" if there is none."""
    if "error" in space or not space["writable"]:
        return f"cannot be written to ({space.get('error', 'no permission')})"
    free, size = human_bytes(space["free"]), human_bytes(space["size"])
    return f"has too little free space ({free} of {size})" if space["free"] < need else ""


def _packages(host: str, machine: Json) -> Iterator[Check]:
    installed, path = machine["packages"], machine["python"]["executable"]
    missing = [name for name in NEEDED if not installed[name]]
    for name in missing:
        yield failure(
            f"{name}.missing",
            f"{name} is missing {on(host)}, in {path}.",
            f"Run {on(host)}: {path} -m pip install {name}, or select another Python with "
            "--python.",
            host,
        )
    if host == HERE and not missing:
        versions = ", ".join(f"{name} {installed[name]}" for name in NEEDED)
        yield passed("versions", f"Python {machine['python']['version']}, {versions}", host)
    torch = machine.get("torch", {})
    if installed["torch"] and "error" in torch:
        yield failure(
            "torch.broken",
            f"torch cannot be imported {on(host)}: {torch['error']}.",
            "Import it there, and reinstall it if that fails.",
            host,
        )


def _gpus(host: str, machine: Json) -> Iterator[Check]:
    probed, usable = machine["gpus"], gpus(machine)
    if obstacle := usable.obstacle:
        yield warning(
            f"gpus.{obstacle.kind}",
            f"no GPU can be used {on(host)}: {obstacle.reason}.",
            obstacle.remedy,
            host,
        )
    if usable.usable:
        nccl = ".".join(map(str, usable.nccl)) or "none"
        kinds = joined([f"GPU {gpu.index} ({gpu.name})" for gpu in usable.usable])
        yield passed("gpus", f"{kinds}; driver {probed['driver']}, torch's NCCL {nccl}", host)
    yield passed("backend", _backend(usable), host)


def _backend(usable: Gpus) -> str:
    """Return the backend that ranks on a machine would use, and the reason."""
    n = len(usable.usable)
    if not n:
        return f"no GPU: {assign_devices(2, usable)[2]}"
    return "; ".join(f"{count(r, 'rank')}: {assign_devices(r, usable)[2]}" for r in (n, 2 * n))


# -- between machines ------------------------------------------------------------------------------


def cross_host_checks(facts: Facts) -> Iterator[Check]:
    """Yield every check between machines."""
    yield from _lost(facts)
    if facts.hosts:
        for check in (_names, _reachability, _versions, _shared):
            yield from check(facts)


# -- ssh -------------------------------------------------------------------------------------------

_SILENT = (
    "ssh.silent",
    "{host} does not respond",
    "Check that it is running and not overloaded, and check firewalls and cables on the route: "
    "ip -4 route get {host}.",
)

_PYTHON = "Install this machine's environment there, or select another Python with --python."

#: Kind, message and remedy for each phrase in ssh's error; the first match wins.
_SSH = {
    "permission denied": (
        "ssh.password",
        "ssh to {host} needs a password",
        "Set up a key: ssh-keygen, then ssh-copy-id {target}.",
    ),
    "host key verification failed": (
        "ssh.key",
        "the host key of {host} is unknown or has changed",
        "Check and accept it: ssh {target}. After a reinstallation, run ssh-keygen -R {host} "
        "first.",
    ),
    "could not resolve hostname": (
        "names.unknown",
        "the name {host} cannot be resolved here",
        "Add it to /etc/hosts or ~/.ssh/config here, or use an address.",
    ),
    "connection refused": (
        "ssh.refused",
        "no SSH server is listening on {host}",
        "Start sshd there, or set its port in ~/.ssh/config.",
    ),
    "no route to host": _SILENT,
    "timed out": _SILENT,
    "no reply": _SILENT,
    "no python": ("python.missing", "Python is not installed on {host}", _PYTHON),
    "is too old": ("python.old", "Python on {host} is too old", _PYTHON),
    "": (
        "ssh.other",
        "no program can be started on {host}",
        "Try to start one: ssh {target} python3 --version.",
    ),
}


def _lost(facts: Facts) -> Iterator[Check]:
    for host, loss in facts.lost.items():
        message, names = loss["message"], {"host": host, "target": facts.targets[host]}
        kind, problem, remedy = next(x for phrase, x in _SSH.items() if phrase in message.lower())
        if loss["stage"]:
            kind, problem = "ssh.cut", f'{{host}} stopped responding in stage "{loss["stage"]}"'
        yield failure(kind, f"{problem.format(**names)} ({message}).", remedy.format(**names), host)
    if reached := [host for host in facts.hosts if host not in facts.lost]:
        yield passed("ssh", f"passwordless ssh works: {joined(reached)}", *reached)


# -- names -----------------------------------------------------------------------------------------


def _names(facts: Facts) -> Iterator[Check]:
    found = [
        check
        for resolver, known in facts.names.items()
        for host, reply in known.items()
        # ssh's configuration may define other names; an address needs no lookup
        if resolver != HERE and host in facts.machines and not host.replace(".", "").isdigit()
        for check in _name(facts, resolver, host, reply)
    ]
    yield from found
    if not found:
        yield passed("names", "every machine resolves the names of the others")


def _name(facts: Facts, resolver: str, host: str, reply: Json) -> Iterator[Check]:
    """Yield a failed check if a machine does not resolve a host's name correctly."""
    first, correct = reply.get("addresses", [""])[0], facts.addresses.get(host, "ADDRESS")
    add = f"Add the line '{correct} {host}' to /etc/hosts {on(resolver)}"
    if "error" in reply:
        yield failure(
            "names.unknown",
            f"{host!r} does not resolve to an IPv4 address {on(resolver)} ({reply['error']}).",
            f"{add}, or fix the name server in /etc/resolv.conf.",
            resolver,
            host,
        )
    elif first.startswith("127.") and not correct.startswith("127."):
        name = "its own name" if resolver == host else repr(host)
        yield failure(
            "names.loopback",
            f"{resolver} resolves {name} to {first}, where other machines cannot reach ranks.",
            f"{add}, in place of the one with {first}.",
            resolver,
            host,
        )
    elif resolver != host and first not in facts.machines[host]["addresses"]:
        yield failure(
            "names.wrong",
            f"{resolver} resolves {host!r} to {first}, which is not an address of {host}.",
            f"{add}, or correct the name server.",
            resolver,
            host,
        )


# -- packets ---------------------------------------------------------------------------------------
# Connections show whether programs can reach each other. Datagrams need no reply, so they show in
# which direction packets are lost.

#: The connection errors that a broken link causes.
_UNANSWERED = ("timed out", "no route to host", "network is unreachable")


def _reachability(facts: Facts) -> Iterator[Check]:
    """Yield the problems of the connections between machines."""
    filtered: dict[tuple[str, str], list[str]] = defaultdict(list)
    found = list[Check]()
    for a, b in combinations(facts.machines, 2):
        forward, backward = (facts.connection(*pair).get("tcp", "") for pair in ((a, b), (b, a)))
        if forward and backward and (lost := _lost_packets(facts, a, b, forward, backward)):
            found.append(lost)
        else:
            for source, to, error in ((a, b, forward), (b, a, backward)):
                if error:
                    filtered[to, error].append(source)
    found += [_blocked_connections(to, sources, error) for (to, error), sources in filtered.items()]
    yield from found
    if facts.connections and not found:
        yield passed("connections", "every machine can connect to every other")


def _lost_packets(facts: Facts, a: str, b: str, forward: str, backward: str) -> Check | None:
    """Return a check for two machines that cannot connect; None if a firewall is the cause."""
    sent, returned = (facts.connection(*pair).get("arrived") for pair in ((a, b), (b, a)))
    if sent and returned:
        return None  # a firewall blocks only connections
    if sent or returned:
        source, dest = (b, a) if sent else (a, b)
        return failure(
            "connections.one_way",
            f"packets from {named(source)} to {named(dest)} are lost, but those from {named(dest)} "
            f"to {named(source)} arrive.",
            f"Check the firewall on {named(dest)} (iptables -L INPUT), the outgoing rules of "
            f"{named(source)}, and the route: ip -4 route get "
            f"{facts.addresses.get(dest, 'ADDRESS')} {on(source)}.",
            source,
            dest,
        )
    if forward not in _UNANSWERED and backward not in _UNANSWERED:
        return None  # both machines reply, for example by refusing connections
    return failure(
        "connections.cut",
        f"all packets between {named(a)} and {named(b)} are lost, in both directions ({forward}).",
        "Check cables, switch ports, VLANs and routes on both machines: ip link, ip -4 route.",
        a,
        b,
    )


def _blocked_connections(to: str, sources: list[str], error: str) -> Check:
    """Return a check for a machine that blocks incoming connections."""
    remedy = (
        "Open the port range in /proc/sys/net/ipv4/ip_local_port_range to these machines: "
        "iptables -L INPUT, ufw status."
    )
    if to == HERE:
        remedy += " Or start the notebook on one of the hosts."
    return failure(
        "connections.filtered",
        f"{named(to)} blocks incoming connections: {named(*sources)} cannot connect to a "
        f"listening port there ({error}).",
        remedy,
        to,
        *sources,
    )


# -- differences -----------------------------------------------------------------------------------


def _versions(facts: Facts) -> Iterator[Check]:
    local, found = facts.machines[HERE], list[Check]()
    for host in facts.hosts:
        found += _differences(host, local, facts.machines[host])
    yield from found
    if not found:
        same = ", ".join(f"{name} {local['packages'][name]}" for name in NEEDED)
        yield passed(
            "versions", f"the same everywhere: Python {local['python']['version']}, {same}"
        )


def _differences(host: str, local: Json, remote: Json) -> Iterator[Check]:
    """Compare releases; Python patch releases and local builds of packages may differ."""
    python, path = remote["python"]["version"], remote["python"]["executable"]
    expected = local["python"]["version"]
    # different releases cannot unpickle each other's functions
    if python.split(".")[:2] != expected.split(".")[:2]:
        yield failure(
            "python.differs",
            f"{host} has Python {python} ({path}), but this machine has {expected}.",
            f"Install Python {expected} there, or select it with --python.",
            host,
        )
    for name in NEEDED:
        a, b = local["packages"][name], remote["packages"][name]
        if a and b and a.split("+")[0] != b.split("+")[0]:
            yield failure(
                f"{name}.differs",
                f"{host} has {name} {b} ({path}), but this machine has {a}.",
                f"Run there: {path} -m pip install {name}=={a.split('+')[0]}.",
                host,
            )


def _shared(facts: Facts) -> Iterator[Check]:
    unshared = [host for host in facts.hosts if not facts.folder_visible.get(host)]
    if unshared:
        yield warning(
            "folder.unshared",
            f"this folder, {facts.folder}, is not shared with {joined(unshared)}: modules, data "
            "and checkpoints in it are not found there.",
            "Share it (NFS), copy the files that ranks need, or define functions in the notebook: "
            "these are sent to the ranks.",
            *unshared,
        )
    else:
        yield passed("folder.shared", f"{facts.folder} is shared by all machines")


# -- the report ----------------------------------------------------------------------------------

#: Maximum length of a line [columns].
WIDTH = 100


@dataclass(frozen=True)
class Report:
    """The doctor's report. Notebooks and ``print`` show it as text.

    Args:
        facts: the facts to check.
    """

    facts: Facts

    @cached_property
    def checks(self) -> list[Check]:
        """The reported checks, failures first."""
        single = not self.facts.targets  # for several machines, only problems are reported
        machines = self.facts.machines.items()
        results = [c for host, m in machines for c in host_checks(host, m)]
        reported = [c for c in results if single or c.level is not Level.OK]
        order = [Level.FAILURE, Level.WARNING, Level.OK]
        checks = [*reported, *cross_host_checks(self.facts)]
        return sorted(checks, key=lambda check: order.index(check.level))

    @property
    def failures(self) -> list[Check]:
        """The problems that prevent ranks from working together."""
        return [check for check in self.checks if check.level is Level.FAILURE]

    @property
    def ok(self) -> bool:
        """Whether there are no failures."""
        return not self.failures

    @property
    def title(self) -> str:
        """A one-line summary."""
        hosts = len({*self.facts.targets} - {HERE})
        title = f"this machine ({self.facts.machines[HERE]['hostname']})"
        title += f" and {count(hosts, 'host')}" if hosts else ""
        levels = Counter(check.level for check in self.checks if check.level is not Level.OK)
        problems = ", ".join(count(n, str(level)) for level, n in levels.items())
        return f"{title}: {problems or 'no problems found'}"

    def to_json(self) -> str:
        """Return a JSON object with ``ok``, the ``checks``, and the ``facts`` behind them."""
        checks = [asdict(check) for check in self.checks]
        content = {"ok": self.ok, "checks": checks, "facts": asdict(self.facts)}
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        lines = [line for check in self.checks for line in _lines(check)]
        return "\n".join([self.title, "", *lines])

    __repr__ = __str__


def _lines(check: Check) -> list[str]:
    """Return a check as a paragraph."""
    return textwrap.wrap(
        f"{check.level:<8} {check}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * 11,
        break_on_hyphens=False,
        break_long_words=False,
    )
