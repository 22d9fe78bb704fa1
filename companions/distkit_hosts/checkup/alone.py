"""What one machine can do, and what is wrong with it, by itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from distkit.cluster import limits
from distkit.cluster.gpus import Gpus
from distkit.cluster.plan import COMFORTABLE, RANK_BYTES, make_plan
from distkit.cluster.processes import folders
from distkit.errors import StartError
from distkit.views.scene.units import count, human_bytes, joined
from distkit_hosts.checkup.check import Check, failure, fine, on, warning
from distkit_hosts.checkup.facts import (
    HERE,
    Json,
    comfortable,
    cores,
    fitting,
    gpus,
)

#: Docker gives a container so much shared memory if nothing is said [bytes].
SMALL_SHM = 64 << 20

#: A file system with less than this is full [bytes].
FULL = 1 << 20

#: A rank has about so many threads: torch's, gloo's, ZeroMQ's.
THREADS = 20

#: Ranks connect to each other and to the controller: fewer ports are soon used up.
FEW_PORTS = 1000

#: distkit itself needs at least this Python.
OLDEST = (3, 10)

#: What ranks need, and what the notebook needs beside it.
NEEDED, NOTEBOOK = ("torch", "ipyparallel", "distkit"), ("jupyterlab", "ipykernel", "anywidget")


def judge(host: str, machine: Json) -> Iterator[Check]:
    """Every check of one machine."""
    for check in (_memory, _shm, _temporary, _files, _processes, _ports, _loopback):
        yield from check(host, machine)
    for check in (_python, _packages, _torch, _gpus):
        yield from check(host, machine)
    if host == HERE:
        yield from _hub(machine)
        yield from _launchers(machine)
        yield from _laboratory(machine)


def _memory(host: str, machine: Json) -> Iterator[Check]:
    free, fit = machine["memory"]["free"], fitting(machine)
    n, good = cores(machine), comfortable(machine)
    have = f"{human_bytes(free)} of memory {on(host)} is free"
    if not fit:
        need = human_bytes(RANK_BYTES)
        remedy = "Stop other programs there, or allow the container more memory."
        yield failure("memory", f"{have}, and a rank needs {need}.", remedy, host)
        return
    if fit < n:
        remedy = f"Ask for at most {fit} there, or free some memory."
        yield warning(
            "memory", f"{have}: room for {count(fit, 'rank')} on {n} cores.", remedy, host
        )
    quota = machine["cores"]["quota"]
    usable = machine["cores"]["usable"]
    cut = f" (the cgroup allows {quota:g} of {usable})" if quota and quota < usable else ""
    text = f"{count(n, 'core')}{cut}, {human_bytes(free)} of memory free"
    why = f"{COMFORTABLE} a core" if good < fit else "as many as memory holds"
    yield fine("ranks", f"{text}: {count(good, 'rank')} {on(host)} in comfort, {why}", host)


def _shm(host: str, machine: Json) -> Iterator[Check]:
    shm = machine["shm"]
    if "error" in shm:
        yield failure(
            "shm",
            f"there is no /dev/shm {on(host)} ({shm['error']}): ranks share memory there.",
            "Mount it: mount -t tmpfs tmpfs /dev/shm.",
            host,
        )
    elif shm["free"] < FULL:
        yield failure(
            "shm",
            f"/dev/shm {on(host)} is full ({human_bytes(shm['size'])}).",
            "Remove the files there that no program uses any more.",
            host,
        )
    elif shm["size"] <= SMALL_SHM:
        yield warning(
            "shm",
            f"/dev/shm {on(host)} has {human_bytes(shm['size'])} only, as containers have: data "
            "loaders and shared-memory collectives soon fill it.",
            "Start the container with --shm-size=2g.",
            host,
        )
    else:
        yield fine("shm", f"/dev/shm: {_left(shm)}", host)


def _left(room: Json) -> str:
    return f"{human_bytes(room['free'])} of {human_bytes(room['size'])} free"


def _temporary(host: str, machine: Json) -> Iterator[Check]:
    room = machine["temporary"]
    path = room["path"]
    ranks = max(1, comfortable(machine))
    need = folders.room(ranks)
    elsewhere = "or set TMPDIR to a folder with"
    if "error" in room or not room["writable"]:
        why = room.get("error", "no permission")
        remedy = "Set TMPDIR to a folder of yours."
        what = f"the temporary folder {path} {on(host)} cannot be written to ({why})."
        yield failure("disk.locked", what, remedy, host)
    elif room["free"] < need or room["files"] == 0:
        left = "no more files" if room["files"] == 0 else f"{human_bytes(room['free'])} left"
        yield failure(
            "disk.full",
            f"the disk of {path} {on(host)} is full: {left}, and {count(ranks, 'rank')} "
            f"may write {human_bytes(need)} there.",
            f"Free some space, {elsewhere} more.",
            host,
        )
    elif len(path) + len("/distkit-12345678") > folders.LONGEST:
        yield failure(
            "disk.path",
            f"the path of the temporary folder {on(host)} is too long for sockets ({path}).",
            "Set TMPDIR to a folder with a shorter path.",
            host,
        )
    else:
        yield fine("disk", f"{path}: {_left(room)}", host)


def _files(host: str, machine: Json) -> Iterator[Check]:
    soft, hard = (math.inf if n < 0 else n for n in machine["files"])
    wanted = max(2, comfortable(machine))
    need = limits.files(wanted)
    ours = max(need["kernel"], need["rank"])
    if soft < ours or hard < need["controller"]:
        most = max(1024, *need.values())
        yield failure(
            "files",
            f"a process {on(host)} may open {soft:g} files at once, at most {hard:g}, and "
            f"{wanted} ranks need {max(need.values())}.",
            f"Raise the limit: ulimit -n {most}, or nofile in /etc/security/limits.conf.",
            host,
        )
    else:
        yield fine("files", f"a process may open {soft:g} files", host)


def _processes(host: str, machine: Json) -> Iterator[Check]:
    left, wanted = machine["processes"]["left"], max(2, comfortable(machine))
    if left is None or left >= THREADS * (wanted + 2):
        return
    fit = max(0, left // THREADS - 2)
    what = f"{left} more threads may be started {on(host)}: enough for {count(fit, 'rank')}."
    remedy = "Raise the limit: ulimit -u, or the container's --pids-limit."
    yield (failure if not fit else warning)("processes", what, remedy, host)


def _ports(host: str, machine: Json) -> Iterator[Check]:
    first, last = machine["ports"] or (1024, 65535)
    what = f"ports {first} to {last} are free to use {on(host)}"
    if last - first < FEW_PORTS:
        remedy = "Allow more: sysctl -w net.ipv4.ip_local_port_range='32768 60999'."
        yield warning("ports", f"only {what}.", remedy, host)
    else:
        yield fine("ports", what, host)


def _loopback(host: str, machine: Json) -> Iterator[Check]:
    if machine["loopback"]:
        yield failure(
            "loopback",
            f"127.0.0.1 {on(host)} does not work ({machine['loopback']}): ranks of one machine "
            "talk by it.",
            "Switch it on: ip link set lo up.",
            host,
        )
    else:
        yield fine("loopback", "loopback works", host)


def _python(host: str, machine: Json) -> Iterator[Check]:
    version, path = machine["python"]["version"], machine["python"]["executable"]
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        yield failure(
            "python.old",
            f"{path} {on(host)} is Python {version}.",
            f"distkit needs Python {'.'.join(map(str, OLDEST))}: install it, or name another "
            "one with --python.",
            host,
        )


def _packages(host: str, machine: Json) -> Iterator[Check]:
    have, python = machine["packages"], machine["python"]["executable"]
    missing = [name for name in NEEDED if not have[name]]
    for name in missing:
        other = "" if host == HERE else "; or name another Python with --python"
        remedy = f"Run {on(host)}: {python} -m pip install {name}{other}."
        yield failure(
            f"{name}.missing", f"{name} is missing {on(host)}, in {python}.", remedy, host
        )
    absent = [name for name in NOTEBOOK if not have[name]] if host == HERE else []
    if absent:
        what = f"{joined(absent)} {'is' if len(absent) == 1 else 'are'} missing here: no notebooks."
        yield warning("notebook", what, f"Run: pip install {' '.join(absent)}", host)
    if host == HERE and not missing:
        versions = [f"{name} {have[name]}" for name in (*NEEDED, *NOTEBOOK) if have[name]]
        yield fine(
            "versions", f"Python {machine['python']['version']}, {', '.join(versions)}", host
        )


def _torch(host: str, machine: Json) -> Iterator[Check]:
    torch = machine.get("torch")
    if torch is None or not machine["packages"]["torch"]:
        return
    if "slow" in torch:
        what = f"importing torch {on(host)} took more than {torch['slow']} s."
        remedy = "Look at the load there, and whether its folder is on a slow network disk."
        yield warning("torch.slow", what, remedy, host)
    elif "error" in torch:
        what = f"torch {on(host)} does not import: {torch['error']}."
        yield failure("torch.broken", what, "Install it again there.", host)
    elif not torch["gloo"]:
        what = f"torch {torch['version']} {on(host)} was built without gloo."
        yield failure("torch.gloo", what, "Install torch from its own packages.", host)


def _gpus(host: str, machine: Json) -> Iterator[Check]:
    found, usable = machine["gpus"], gpus(machine)
    if why := usable.obstacle:
        yield warning(
            f"gpus.{why.kind}", f"no GPU can be used {on(host)}: {why.what}.", why.remedy, host
        )
    for lost in (each for each in found["found"] if "error" in each and usable.usable):
        what = f"GPU {lost['index']} {on(host)} does not answer: {lost['error']}."
        yield warning("gpus.lost", what, "Look at nvidia-smi and dmesg; reset it, or reboot.", host)
    if usable.usable:
        nccl = ".".join(map(str, usable.nccl)) or "none"
        kinds = joined([f"{gpu.label} ({gpu.name})" for gpu in usable.usable])
        memory = human_bytes(sum(gpu.free for gpu in usable.usable))
        what = f"{kinds}, {memory} free; driver {found.get('driver', '?')}"
        yield fine("gpus", f"{what}, torch's NCCL {nccl}", host)
    yield fine("backend", backend(machine, usable), host)


def backend(machine: Json, usable: Gpus) -> str:
    """How ranks of this machine would communicate, and why."""
    numbers = {"cpus": cores(machine), "memory": machine["memory"]["free"]}

    def of(ranks: int) -> str:
        try:
            return make_plan(ranks, 0, "auto", "auto", **numbers, gpus=usable).note
        except StartError as error:
            return str(error)

    n = len(usable.usable)
    if not n:
        return f"no GPU: {of(2)}"
    return "; ".join(f"{count(ranks, 'rank')}: {of(ranks)}" for ranks in (n, 2 * n))


def _hub(machine: Json) -> Iterator[Check]:
    hub = machine.get("hub")
    if not hub:
        return
    text = f"this is {hub['user']}'s server on a JupyterHub"
    if hub["memory"]:
        loose = hub["memory"] < machine["memory"]["free"]
        text += f", with {human_bytes(hub['memory'])} of memory"
        text += " (nothing but the hub's word limits it to that)" if loose else ""
    yield fine("hub", text, HERE)
    if hub["others"]:
        yield warning(
            "hub.seen",
            f"the processes and command lines of {count(hub['others'], 'other user')} are seen "
            "here, and yours by them. Files, memory and sockets are closed to them.",
            "Who looks after the hub can hide them: docs/hub.md says how.",
            HERE,
        )


def _launchers(machine: Json) -> Iterator[Check]:
    launchers = {"ssh": "ssh", "slurm": "srun", "mpi": "mpiexec"}
    have = [name for name, command in launchers.items() if machine["commands"][command]]
    lack = [f"{name} (no {c})" for name, c in launchers.items() if not machine["commands"][c]]
    text = f"ranks on other machines: by {joined(have)}" if have else "no ranks on other machines"
    yield fine("launchers", text + (f"; not by {joined(lack)}" if lack else ""), HERE)


def _laboratory(machine: Json) -> Iterator[Check]:
    lacks = [
        name for name in ("ip", "nsenter", "setpriv", "unshare") if not machine["commands"][name]
    ]
    why = f"no {joined(lacks)} here" if lacks else machine["namespaces"]
    if why:
        yield fine("laboratory", f"no laboratory of several hosts here: {why}", HERE)
    else:
        yield fine("laboratory", "a laboratory of several hosts can be made here", HERE)
