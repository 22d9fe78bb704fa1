"""Checks of one machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from distkit._format import count, human_bytes, joined
from distkit.cluster.gpus import Gpus
from distkit.cluster.plan import COMFORTABLE, RANK_BYTES, make_plan
from distkit.cluster.processes import folders
from distkit.errors import StartError
from distkit_hosts.checkup.facts import (
    HERE,
    Check,
    Json,
    comfortable,
    cores,
    failure,
    fine,
    fitting,
    gpus,
    on,
    warning,
)

#: Docker gives a container this much shared memory by default [bytes].
SMALL_SHM = 64 << 20

#: A file system with less than this is full [bytes].
FULL = 1 << 20

#: The packages that ranks need.
NEEDED = ("torch", "ipyparallel", "distkit")


def judge(host: str, machine: Json) -> Iterator[Check]:
    """Yield every check of one machine."""
    for check in (_memory, _shm, _temporary, _packages, _torch, _gpus):
        yield from check(host, machine)


def _memory(host: str, machine: Json) -> Iterator[Check]:
    free, n, good = machine["memory"]["free"], cores(machine), comfortable(machine)
    if not good:
        yield failure(
            "memory",
            f"{human_bytes(free)} of memory {on(host)} is free, and a rank needs "
            f"{human_bytes(RANK_BYTES)}.",
            "Stop other programs there, or allow the container more memory.",
            host,
        )
        return
    quota, usable = machine["cores"]["quota"], machine["cores"]["usable"]
    cut = f" (the cgroup allows {quota:g} of {usable})" if quota and quota < usable else ""
    text = f"{count(n, 'core')}{cut}, {human_bytes(free)} of memory free"
    why = f"{COMFORTABLE} a core" if good < fitting(machine) else "as many as memory holds"
    yield fine("ranks", f"{text}: {count(good, 'rank')} {on(host)} in comfort, {why}", host)


def _shm(host: str, machine: Json) -> Iterator[Check]:
    shm = machine["shm"]
    if "error" in shm or shm["free"] < FULL:
        yield failure(
            "shm",
            f"/dev/shm {on(host)}, where ranks share memory, {_is_wrong(shm)}.",
            "Mount it (mount -t tmpfs tmpfs /dev/shm), or remove files there.",
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


def _is_wrong(room: Json) -> str:
    """Return a clause about the problem of a file system."""
    if "error" in room or not room["writable"]:
        return f"cannot be written to ({room.get('error', 'no permission')})"
    return f"is full ({'no more files' if room['files'] == 0 else _left(room)})"


def _left(room: Json) -> str:
    return f"{human_bytes(room['free'])} of {human_bytes(room['size'])} free"


def _temporary(host: str, machine: Json) -> Iterator[Check]:
    room, need = machine["temporary"], folders.space_needed(max(1, comfortable(machine)))
    if "error" in room or not room["writable"] or room["files"] == 0 or room["free"] < need:
        yield failure(
            "disk",
            f"the temporary folder {room['path']} {on(host)} {_is_wrong(room)}.",
            f"Free {human_bytes(need)} there, or set TMPDIR to another folder of yours.",
            host,
        )
    else:
        yield fine("disk", f"{room['path']}: {_left(room)}", host)


def _packages(host: str, machine: Json) -> Iterator[Check]:
    have, version = machine["packages"], machine["python"]["version"]
    path, other = machine["python"]["executable"], ", or name another Python with --python."
    missing = [name for name in NEEDED if not have[name]]
    for name in missing:
        yield failure(
            f"{name}.missing",
            f"{name} is missing {on(host)}, in {path}.",
            f"Run {on(host)}: {path} -m pip install {name}{other}",
            host,
        )
    if host == HERE and not missing:
        versions = ", ".join(f"{name} {have[name]}" for name in NEEDED)
        yield fine("versions", f"Python {version}, {versions}", host)


def _torch(host: str, machine: Json) -> Iterator[Check]:
    torch = machine.get("torch", {})
    if "slow" in torch:
        yield warning(
            "torch.slow",
            f"importing torch {on(host)} took more than {torch['slow']} s.",
            "Look at the load there, and whether its folder is on a slow network disk.",
            host,
        )
    elif machine["packages"]["torch"] and "error" in torch:
        yield failure(
            "torch.broken",
            f"torch {on(host)} does not import: {torch['error']}.",
            "Install it again there.",
            host,
        )


def _gpus(host: str, machine: Json) -> Iterator[Check]:
    found, usable = machine["gpus"], gpus(machine)
    if why := usable.obstacle:
        yield warning(
            f"gpus.{why.kind}", f"no GPU can be used {on(host)}: {why.what}.", why.remedy, host
        )
    for lost in (each for each in found["found"] if "error" in each and usable.usable):
        yield warning(
            "gpus.lost",
            f"GPU {lost['index']} {on(host)} does not answer: {lost['error']}.",
            "Look at nvidia-smi and dmesg; reset it, or reboot.",
            host,
        )
    if usable.usable:
        nccl = ".".join(map(str, usable.nccl)) or "none"
        kinds = joined([f"{gpu.label} ({gpu.name})" for gpu in usable.usable])
        memory = human_bytes(sum(gpu.free for gpu in usable.usable))
        what = f"{kinds}, {memory} free; driver {found.get('driver', '?')}, torch's NCCL {nccl}"
        yield fine("gpus", what, host)
    yield fine("backend", backend(machine, usable), host)


def backend(machine: Json, usable: Gpus) -> str:
    """Return the backend that ranks of this machine would use, and the reason."""
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
