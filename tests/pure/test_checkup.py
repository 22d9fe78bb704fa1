"""The doctor's checks, applied to given data about machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from distkit_hosts.checkup import probe
from distkit_hosts.checkup.checks import Report
from distkit_hosts.checkup.facts import HERE, Facts, Json, Level

GIB = 1 << 30


def healthy(name: str, address: str) -> Json:
    """The data about a healthy machine."""
    space = {"size": 8 * GIB, "free": 6 * GIB, "writable": True}
    return {
        "hostname": name,
        "python": {"version": "3.11.7", "executable": "/env/bin/python"},
        "packages": dict.fromkeys(probe.PACKAGES, "2.13.0"),
        "cores": {"usable": 4, "quota": None},
        "memory": {"free": 8 * GIB},
        "shm": {"path": "/dev/shm", **space},
        "temporary": {"path": "/tmp", **space},
        "gpus": {"found": []},
        "addresses": ["127.0.0.1", address],
        "torch": {"version": "2.13.0", "cuda": None, "nccl": None},
    }


ADDRESSES = {HERE: "10.0.0.1", "alpha": "10.0.0.2", "beta": "10.0.0.3", "gamma": "10.0.0.4"}


def healthy_facts() -> Facts:
    """The data about three healthy hosts and this machine."""
    names = {HERE: "login", **{host: host for host in ADDRESSES if host != HERE}}
    known = {h: {"addresses": [a]} for h, a in ADDRESSES.items() if h != HERE}
    return Facts(
        machines={h: healthy(names[h], a) for h, a in ADDRESSES.items()},
        targets={host: host for host in names if host != HERE},
        names={h: deepcopy(known) for h in ADDRESSES},
        addresses=dict(ADDRESSES),
        connections={
            a: {b: {"tcp": "", "arrived": True} for b in ADDRESSES if b != a} for a in ADDRESSES
        },
        folder="/home/me/lab",
        folder_visible=dict.fromkeys(ADDRESSES, True),
    )


def test_healthy_machines_have_no_failures() -> None:
    one = Report(Facts({HERE: healthy("login", "10.0.0.1")}))
    assert one.title == "this machine (login): no problems found"
    assert "up to 32 ranks here" in str(one)
    several = Report(healthy_facts())
    assert [c for c in several.checks if c.level is not Level.OK] == []
    assert several.title == "this machine (login) and 3 hosts: no problems found"


# -- faults of one machine -------------------------------------------------------------------------


def change(**changes: Any) -> Callable[[Json], None]:
    """Return a function that changes the data about a machine."""

    def apply(machine: Json) -> None:
        for key, value in changes.items():
            if isinstance(machine[key], dict) and isinstance(value, dict):
                machine[key].update(value)
            else:
                machine[key] = value

    return apply


HOST_FAULTS = [
    ("memory", "failure", "a rank needs", change(memory={"free": 50_000_000})),
    ("shm", "failure", "cannot be written to (No such", change(shm={"error": "No such file"})),
    (
        "shm",
        "failure",
        "which ranks use for shared memory, has too little free space",
        change(shm={"free": 0}),
    ),
    ("shm", "warning", "--shm-size=2g", change(shm={"size": 64 << 20, "free": 60 << 20})),
    (
        "disk",
        "failure",
        "/tmp on beta has too little free space (0 B of 8 GiB)",
        change(temporary={"free": 0}),
    ),
    ("disk", "failure", "cannot be written to", change(temporary={"writable": False})),
    ("torch.missing", "failure", "-m pip install torch", change(packages={"torch": None})),
    (
        "ipyparallel.missing",
        "failure",
        "is missing on beta",
        change(packages={"ipyparallel": None}),
    ),
    ("torch.broken", "failure", "libcudart", change(torch={"error": "OSError: libcudart.so.12"})),
    ("gpus.driver", "warning", "Reboot", change(gpus={"error": "Driver/library version mismatch"})),
]


@pytest.mark.parametrize(
    ("kind", "level", "expected", "fault"), HOST_FAULTS, ids=lambda x: str(x)[:24]
)
def test_faults_of_one_machine_are_reported(
    kind: str, level: str, expected: str, fault: Callable[[Json], None]
) -> None:
    facts = healthy_facts()
    fault(facts.machines["beta"])
    found = [check for check in Report(facts).checks if check.kind == kind and check.remedy]
    assert [(str(c.level), c.hosts) for c in found] == [(level, ("beta",))]
    assert expected in str(found[0])
    assert "on beta" in str(found[0])


GPUS: Json = {
    "found": [{"index": i, "name": "H200", "uuid": f"GPU-{i}"} for i in range(2)],
    "driver": "580.65.06",
}


@pytest.mark.parametrize(
    ("torch", "gpus", "expected"),
    [
        ({}, {}, "ok GPU 0 (H200) and GPU 1 (H200); driver 580.65.06"),
        ({}, {}, "torch's NCCL 2.29.7"),
        ({}, {}, "2 ranks: nccl: every rank has its own GPU; 4 ranks: gloo: ranks 0 and 2"),
        ({}, {"visible": ""}, "no GPU can be used here: CUDA_VISIBLE_DEVICES='' selects none"),
        ({"error": "OSError"}, {}, "no GPU can be used here: torch does not respond"),
        ({"cuda": None}, {}, "no GPU can be used here: torch is built without CUDA. Install torch"),
    ],
)
def test_gpu_state_is_reported(torch: Json, gpus: Json, expected: str) -> None:
    machine = healthy("login", "10.0.0.1")
    machine["gpus"] = {**GPUS, **gpus}
    known = {"version": "2.13.0", "cuda": "13.0", "nccl": [2, 29, 7]}
    machine["torch"] = torch if "error" in torch else known | torch
    assert expected in " ".join(str(Report(Facts({HERE: machine}))).split())


# -- faults between machines -----------------------------------------------------------------------


def drop_packets(facts: Facts, a: str, b: str) -> None:
    facts.connection(a, b).update(tcp="timed out", arrived=False)


def link_cut(facts: Facts) -> None:
    drop_packets(facts, "alpha", "beta")
    drop_packets(facts, "beta", "alpha")


def one_direction(facts: Facts) -> None:
    link_cut(facts)
    facts.connection("beta", "alpha")["arrived"] = True


def firewall(facts: Facts) -> None:
    for host in (HERE, "alpha", "gamma"):
        drop_packets(facts, host, "beta")


def change_alphas_name(**found: Any) -> Callable[[Facts], None]:
    """Change what beta finds when it resolves the name of alpha."""
    return lambda facts: facts.names["beta"].update(alpha=found)


def unreachable(message: str) -> Callable[[Facts], None]:
    def fault(facts: Facts) -> None:
        del facts.machines["beta"], facts.names["beta"], facts.connections["beta"]
        for peers in facts.connections.values():
            peers.pop("beta", None)
        facts.lost["beta"] = {"message": message, "stage": ""}

    return fault


def change_beta(**changes: Any) -> Callable[[Facts], None]:
    return lambda facts: change(**changes)(facts.machines["beta"])


NETWORK_FAULTS = [
    ("connections.cut", "all packets between alpha and beta are lost", link_cut),
    ("connections.one_way", "packets from alpha to beta are lost", one_direction),
    (
        "connections.filtered",
        "beta blocks incoming connections: this machine, alpha and gamma",
        firewall,
    ),
    (
        "names.unknown",
        "'alpha' does not resolve to an IPv4 address on beta",
        change_alphas_name(error="Name or service not known"),
    ),
    (
        "names.loopback",
        "beta resolves 'alpha' to 127.0.1.1, where other machines",
        change_alphas_name(addresses=["127.0.1.1"]),
    ),
    (
        "names.wrong",
        "to 10.0.0.99, which is not an address of alpha. Add the line '10.0.0.2",
        change_alphas_name(addresses=["10.0.0.99"]),
    ),
    ("ssh.password", "ssh-copy-id", unreachable("me@beta: Permission denied (publickey,password)")),
    (
        "ssh.key",
        "the host key of beta is unknown",
        unreachable("Host key verification failed"),
    ),
    (
        "names.unknown",
        "the name beta cannot be resolved here",
        unreachable("ssh: Could not resolve hostname"),
    ),
    (
        "ssh.refused",
        "no SSH server is listening on beta",
        unreachable("port 22: Connection refused"),
    ),
    ("ssh.silent", "beta does not respond", unreachable("port 22: No route to host")),
    ("python.missing", "Python is not installed on beta", unreachable("no Python: python3 python")),
    ("ssh.other", "Try to start one: ssh beta", unreachable("exec format error")),
    (
        "ssh.cut",
        'beta stopped responding in stage "files"',
        lambda facts: facts.lost.update(beta={"message": "no reply within 6 s", "stage": "files"}),
    ),
    ("python.differs", "beta has Python 3.12.1", change_beta(python={"version": "3.12.1"})),
    ("torch.differs", "pip install torch==2.13.0", change_beta(packages={"torch": "2.10.0"})),
    ("ipyparallel.differs", "ipyparallel 9.0.0", change_beta(packages={"ipyparallel": "9.0.0"})),
    ("distkit.differs", "beta has distkit 0.0.1", change_beta(packages={"distkit": "0.0.1"})),
    (
        "folder.unshared",
        "this folder, /home/me/lab, is not shared with beta",
        lambda facts: facts.folder_visible.update(beta=False),
    ),
]


@pytest.mark.parametrize(
    ("kind", "expected", "fault"), NETWORK_FAULTS, ids=lambda x: getattr(x, "__name__", x)[:32]
)
def test_faults_between_machines_are_reported(
    kind: str, expected: str, fault: Callable[[Facts], None]
) -> None:
    facts = healthy_facts()
    fault(facts)
    report = Report(facts)
    assert expected in " ".join(str(report).split())
    found = [check for check in report.checks if check.level is not Level.OK]
    assert {check.kind for check in found} == {kind}, found
    assert all(check.remedy and check.hosts for check in found)
    assert json.loads(report.to_json())["ok"] is report.ok
