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

#: The default size of a Docker container's shared memory [bytes].
SMALL_SHM = 64 << 20

#: A file system with less free space counts as full [bytes].
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
    return f"is full ({'no inodes left' if space['files'] == 0 else _free_space(space)})"


def _free_space(space: Json) -> str:
    return f"{human_bytes(space['free'])} of {human_bytes(space['size'])} free"


def _temporary(host: str, machine: Json) -> Iterator[Check]:
    space, need = machine["temporary"], folders.space_needed(max(1, comfortable(machine)))
    if "error" in space or not space["writable"] or space["files"] == 0 or space["free"] < need:
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
    if "slow" in torch:
        yield warning(
            "torch.slow",
            f"importing torch {on(host)} took more than {torch['slow']} s.",
            "Check the load there, and whether torch's folder is on a slow network disk.",
            host,
        )
    elif machine["packages"]["torch"] and "error" in torch:
        yield failure(
            "torch.broken",
            f"torch cannot be imported {on(host)}: {torch['error']}.",
            "Reinstall it there.",
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
        kinds = joined([f"{gpu.label} ({gpu.name})" for gpu in usable.usable])
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
