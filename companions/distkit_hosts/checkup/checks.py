"""Checks of machines, and of the connections and the differences between them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distkit._format import count, human_bytes, human_seconds, joined
from distkit.cluster.gpus import Gpus
from distkit.cluster.plan import COMFORTABLE, RANK_BYTES, make_plan
from distkit.cluster.processes import folders
from distkit.errors import StartError
from distkit_hosts.checkup.facts import (
    HERE,
    Check,
    Facts,
    Json,
    comfortable,
    cores,
    failure,
    fine,
    fitting,
    gpus,
    named,
    on,
    warning,
)

#: Clocks further apart than this are reported [s].
MAX_CLOCK_SKEW = 0.1

#: The default size of a Docker container's shared memory [bytes].
SMALL_SHM = 64 << 20

#: A file system with less free space counts as full [bytes].
FULL = 1 << 20

#: The packages that ranks need.
NEEDED = ("torch", "ipyparallel", "distkit")


def of_host(host: str, machine: Json) -> Iterator[Check]:
    """Yield every check of one machine."""
    for check in (_memory, _shm, _temporary, _packages, _torch, _gpus):
        yield from check(host, machine)


def _memory(host: str, machine: Json) -> Iterator[Check]:
    free, n, good = machine["memory"]["free"], cores(machine), comfortable(machine)
    if not good:
        yield failure(
            "memory",
            f"{human_bytes(free)} of memory {on(host)} is free, but a rank needs "
            f"{human_bytes(RANK_BYTES)}.",
            "Stop other programs there, or raise the container's memory limit.",
            host,
        )
        return
    quota, usable = machine["cores"]["quota"], machine["cores"]["usable"]
    limit = f" (the cgroup allows {quota:g} of {usable})" if quota and quota < usable else ""
    text = f"{count(n, 'core')}{limit}, {human_bytes(free)} of memory free"
    why = f"{COMFORTABLE} per core" if good < fitting(machine) else "limited by memory"
    yield fine("ranks", f"{text}: up to {count(good, 'rank')} {on(host)}, {why}", host)


def _shm(host: str, machine: Json) -> Iterator[Check]:
    shm = machine["shm"]
    if "error" in shm or shm["free"] < FULL:
        yield failure(
            "shm",
            f"/dev/shm {on(host)}, where ranks share memory, {_problem(shm)}.",
            "Mount it (mount -t tmpfs tmpfs /dev/shm), or remove files there.",
            host,
        )
    elif shm["size"] <= SMALL_SHM:
        yield warning(
            "shm",
            f"/dev/shm {on(host)} has only {human_bytes(shm['size'])}, a container's default: data "
            "loaders and shared-memory collectives soon fill it.",
            "Start the container with --shm-size=2g.",
            host,
        )
    else:
        yield fine("shm", f"/dev/shm: {_free_space(shm)}", host)


def _problem(space: Json) -> str:
    """Return a clause about the problem of a file system."""
    if "error" in space or not space["writable"]:
        return f"cannot be written to ({space.get('error', 'no permission')})"
    return f"is full ({_free_space(space)})"


def _free_space(space: Json) -> str:
    return f"{human_bytes(space['free'])} of {human_bytes(space['size'])} free"


def _temporary(host: str, machine: Json) -> Iterator[Check]:
    space, need = machine["temporary"], folders.space_needed(max(1, comfortable(machine)))
    if "error" in space or not space["writable"] or space["free"] < need:
        yield failure(
            "disk",
            f"the temporary folder {space['path']} {on(host)} {_problem(space)}.",
            f"Free {human_bytes(need)} there, or set TMPDIR to another folder.",
            host,
        )
    else:
        yield fine("disk", f"{space['path']}: {_free_space(space)}", host)


def _packages(host: str, machine: Json) -> Iterator[Check]:
    installed, version = machine["packages"], machine["python"]["version"]
    path, choice = machine["python"]["executable"], ", or select another Python with --python."
    missing = [name for name in NEEDED if not installed[name]]
    for name in missing:
        yield failure(
            f"{name}.missing",
            f"{name} is missing {on(host)}, in {path}.",
            f"Run {on(host)}: {path} -m pip install {name}{choice}",
            host,
        )
    if host == HERE and not missing:
        versions = ", ".join(f"{name} {installed[name]}" for name in NEEDED)
        yield fine("versions", f"Python {version}, {versions}", host)


def _torch(host: str, machine: Json) -> Iterator[Check]:
    torch = machine.get("torch", {})
    if machine["packages"]["torch"] and "error" in torch:
        yield failure(
            "torch.broken",
            f"torch cannot be imported {on(host)}: {torch['error']}.",
            "Import it there, and reinstall it if that fails.",
            host,
        )


def _gpus(host: str, machine: Json) -> Iterator[Check]:
    probed, usable = machine["gpus"], gpus(machine)
    if why := usable.obstacle:
        yield warning(
            f"gpus.{why.kind}", f"no GPU can be used {on(host)}: {why.what}.", why.remedy, host
        )
    if usable.usable:
        nccl = ".".join(map(str, usable.nccl)) or "none"
        kinds = joined([f"GPU {gpu.index} ({gpu.name})" for gpu in usable.usable])
        yield fine("gpus", f"{kinds}; driver {probed['driver']}, torch's NCCL {nccl}", host)
    yield fine("backend", backend(machine, usable), host)


def backend(machine: Json, usable: Gpus) -> str:
    """Return the backend that ranks of this machine would use, and the reason."""
    numbers = {"cpus": cores(machine), "memory": machine["memory"]["free"]}

    def describe(ranks: int) -> str:
        try:
            return make_plan(ranks, 0, "auto", "auto", **numbers, gpus=usable).note
        except StartError as error:
            return str(error)

    n = len(usable.usable)
    if not n:
        return f"no GPU: {describe(2)}"
    return "; ".join(f"{count(ranks, 'rank')}: {describe(ranks)}" for ranks in (n, 2 * n))


# -- between machines ------------------------------------------------------------------------------


def between_hosts(facts: Facts) -> Iterator[Check]:
    """Yield every check between machines."""
    yield from _lost(facts)
    if facts.hosts:
        for check in (_names, _reachability, _versions, _shared, _clocks):
            yield from check(facts)


# -- ssh -------------------------------------------------------------------------------------------

_SILENT = (
    "ssh.silent",
    "{host} does not answer",
    "Check whether it is running and how busy it is, and the firewalls and cables on the way: "
    "ip -4 route get {host}.",
)

_PYTHON = "Install the environment of this machine there, or select its Python with --python."

#: Kind, message and remedy for a phrase of ssh's error. The first match counts.
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
        "no ssh server answers on {host}",
        "Start sshd there, or set its port in ~/.ssh/config.",
    ),
    "no route to host": _SILENT,
    "timed out": _SILENT,
    "no answer": _SILENT,
    "no python": ("python.missing", "Python is not installed on {host}", _PYTHON),
    "is too old": ("python.old", "the Python of {host} is too old", _PYTHON),
    "": (
        "ssh.other",
        "no program can be started on {host}",
        "Try to start one: ssh {target} python3 --version.",
    ),
}


def _lost(facts: Facts) -> Iterator[Check]:
    for host, loss in facts.lost.items():
        message, names = loss["words"], {"host": host, "target": facts.targets[host]}
        kind, what, remedy = next(x for phrase, x in _SSH.items() if phrase in message.lower())
        if loss["stage"]:
            kind, what = "ssh.cut", f"{{host}} stopped responding during {loss['stage']}"
        yield failure(kind, f"{what.format(**names)} ({message}).", remedy.format(**names), host)
    if reached := [host for host in facts.hosts if host not in facts.lost]:
        yield fine("ssh", f"ssh without a password: {joined(reached)}", *reached)


# -- names -----------------------------------------------------------------------------------------


def _names(facts: Facts) -> Iterator[Check]:
    found = [
        check
        for asked, known in facts.names.items()
        for host, answer in known.items()
        if host in facts.machines and not facts.name(host).replace(".", "").isdigit()
        for check in _name(facts, asked, host, answer)
    ]
    yield from _merged(found)
    if not found:
        yield fine("names", "every machine resolves the names of the others")


def _name(facts: Facts, asked: str, host: str, answer: Json) -> Iterator[Check]:
    """Yield the problem of a host's name on a machine."""
    name, correct = facts.name(host), facts.addresses.get(host, "ADDRESS")
    first = answer.get("addresses", [""])[0]
    add = f"Add the line '{correct} {name}' to /etc/hosts {on(asked)}"
    if asked == HERE != host:
        return  # ssh may have another name here
    if "error" in answer:
        kind, remedy = "names.unknown", f"{add}, or repair the name server in /etc/resolv.conf."
        what = f"{name!r} does not resolve to an IPv4 address {on(asked)} ({answer['error']})."
    elif first.startswith("127.") and not correct.startswith("127."):
        kind, remedy = "names.loopback", f"{add}, in place of the one with {first}."
        subject = "its own name" if asked == host else repr(name)
        what = (
            f"{named(asked)} resolves {subject} to {first}, where other machines cannot reach "
            "ranks."
        )
    elif asked != host and first not in facts.machines[host]["addresses"]:
        kind, remedy = "names.wrong", f"{add}, or correct the name server."
        what = f"{named(asked)} resolves {name!r} to {first}, which is not an address of {host}."
    else:
        return
    # ranks do not need the name of the notebook's machine
    level = warning if host == HERE and kind != "names.wrong" else failure
    yield level(kind, what, remedy, asked, host)


def _merged(checks: list[Check]) -> Iterator[Check]:
    """Merge the checks in which several machines report the same about one host."""
    same: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks:
        same[check.kind, check.hosts[-1]].append(check)
    for (kind, host), (first, *others) in same.items():
        machines = [check.hosts[0] for check in others]
        note = f" The same is true of {named(*machines)}." if machines else ""
        hosts = (first.hosts[0], *machines, host)
        yield Check(kind, first.level, first.message + note, first.remedy, hosts)


# -- packets ---------------------------------------------------------------------------------------
# Connections show whether programs reach each other. Datagrams need no answer, so they show in
# which direction packets are lost.

#: The connection errors of a broken link.
_UNANSWERED = ("timed out", "no route to host", "network is unreachable")


def _reachability(facts: Facts) -> Iterator[Check]:
    """Yield the problems of the connections between machines."""
    filtered: dict[tuple[str, str], list[str]] = defaultdict(list)
    found = list[Check]()
    for a, b in facts.pairs():
        forward, backward = (facts.way(*way).get("tcp", "") for way in ((a, b), (b, a)))
        if forward and backward and (lost := _lost_packets(facts, a, b, forward, backward)):
            found.append(lost)
        else:
            for source, to, why in ((a, b, forward), (b, a, backward)):
                if why:
                    filtered[to, why].append(source)
    found += [_filtered(to, sources, why) for (to, why), sources in filtered.items()]
    yield from found
    if facts.ways and not found:
        yield fine("ways", "every machine connects to every other")


def _lost_packets(facts: Facts, a: str, b: str, forward: str, backward: str) -> Check | None:
    """Return the check of two machines without connections; None if a firewall is the cause."""
    sent, returned = (facts.way(*way).get("arrived") for way in ((a, b), (b, a)))
    if sent and returned:
        return None  # a firewall blocks only connections
    if sent or returned:
        source, dest = (b, a) if sent else (a, b)
        return failure(
            "ways.one_way",
            f"packets from {named(source)} to {named(dest)} are lost, but those from {named(dest)} "
            f"to {named(source)} arrive.",
            f"Check the firewall of {named(dest)} (iptables -L INPUT), the outgoing rules of "
            f"{named(source)}, and the route: ip -4 route get "
            f"{facts.addresses.get(dest, 'ADDRESS')} {on(source)}.",
            source,
            dest,
        )
    if forward not in _UNANSWERED and backward not in _UNANSWERED:
        return None  # at least one of them refuses connections
    return failure(
        "ways.cut",
        f"all packets between {named(a)} and {named(b)} are lost, in both directions ({forward}).",
        "Check cables, switch ports, VLANs and routes of both machines: ip link, ip -4 route.",
        a,
        b,
    )


def _filtered(to: str, sources: list[str], why: str) -> Check:
    """Return the check of a machine that blocks incoming connections."""
    remedy = (
        "Open the ports of /proc/sys/net/ipv4/ip_local_port_range to these machines: "
        "iptables -L INPUT, ufw status."
    )
    if to == HERE:
        remedy += " Or start the notebook on one of the hosts."
    return failure(
        "ways.filtered",
        f"{named(to)} blocks incoming connections: {named(*sources)} cannot connect to a port that "
        f"a program there listens on ({why}).",
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
        yield fine("versions", f"the same everywhere: Python {local['python']['version']}, {same}")


def _differences(host: str, local: Json, remote: Json) -> Iterator[Check]:
    """Compare versions: a different release is a failure, a different patch or build a warning."""
    path = remote["python"]["executable"]
    versions = [("python", local["python"]["version"], remote["python"]["version"])]
    versions += [(name, local["packages"][name], remote["packages"][name]) for name in NEEDED]
    for name, a, b in versions:
        if not (a and b) or a == b:
            continue
        if name == "python":
            same = a.split(".")[:2] == b.split(".")[:2]  # these can unpickle each other's functions
            remedy = f"Install Python {a} there, or select it with --python."
        else:
            public = a.split("+")[0]
            same = public == b.split("+")[0]
            remedy = f"Run there: {path} -m pip install {name}=={public}."
        yield (warning if same else failure)(
            f"{name}.differs",
            f"{host} has {name} {b} ({path}), but this machine has {a}.",
            remedy,
            host,
        )


def _shared(facts: Facts) -> Iterator[Check]:
    unshared = [host for host in facts.hosts if not facts.sees.get(host)]
    if unshared:
        yield warning(
            "folder.own",
            f"this folder, {facts.folder}, is not shared with {joined(unshared)}: modules, data "
            "and checkpoints in it are not found there.",
            "Share it (NFS), copy the files that ranks need, or define functions in the notebook, "
            "which sends them.",
            *unshared,
        )
    else:
        yield fine("folder.shared", f"{facts.folder} is shared by all machines")


def _clocks(facts: Facts) -> Iterator[Check]:
    wrong = {host: c for host, c in facts.clocks.items() if abs(c[0]) > MAX_CLOCK_SKEW + c[1]}
    for host, (offset, error) in wrong.items():
        word = "ahead of" if offset > 0 else "behind"
        yield warning(
            "clock",
            f"the clock of {host} is {human_seconds(abs(offset))} (± {human_seconds(error)}) "
            f"{word} this one: timestamps of the two cannot be compared.",
            "Set it with NTP there: timedatectl set-ntp true.",
            host,
        )
    if facts.clocks and not wrong:
        worst = max(abs(offset) + error for offset, error in facts.clocks.values())
        yield fine("clock", f"clocks agree within {human_seconds(worst)}")
