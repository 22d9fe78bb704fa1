"""A JupyterHub: concurrent users, their isolation, culling, and a restart from the hub's page."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hubs
import psutil
import pytest
from hubs import FIRST, USERS, Hub
from kernels import TIMEOUT, Kernel
from waiting import background_process, wait_until

pytestmark = pytest.mark.timeout(1200)

SETUP = """
import json, os, psutil, time, torch, torch.distributed as dist
from pathlib import Path
import distkit as dk
from distkit import kvstore

def total(size=100_000):
    x = torch.full((size,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[0].item()

def push(key="w"):
    kv = kvstore.create("dist_sync")
    kv.init(key, torch.zeros(100_000))
    kv.push(key, torch.ones(100_000))
    return kv.pull(key)[0].item()

def shared():
    x = torch.ones(100_000)
    dk.algorithms.shared_memory_all_reduce(x)
    return x[0].item()

def run_twice(function, **second):
    function()
    Path(f"blocked-{os.getpid()}").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return function(**second)

cluster = dk.Cluster(2)
run = cluster.run(total)
run.trace.save("mine.trace")
assert run.results == [3.0, 3.0] and cluster.run(shared).results == [2.0, 2.0]
store = dk.Cluster(workers=2, servers=1)
results = store.run(push).results
Path("go").unlink(missing_ok=True)
before = len([*Path().glob("blocked-*")])
blocked = [cluster.submit(run_twice, total), store.submit(run_twice, push, key="v")]
while len([*Path().glob("blocked-*")]) < before + 4:
    time.sleep(0.01)
print(json.dumps({
    "uid": os.getuid(), "home": os.getcwd(), "results": results,
    "pids": [os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))],
    "secrets": [os.environ["JUPYTERHUB_API_TOKEN"], get_ipython().kernel.session.key.decode()],
}))
"""

#: One user's attack on the user described in TARGET; it prints the resources that it can access.
SPY = """
import json, os, socket
from contextlib import suppress
from pathlib import Path

def succeeds(do, *args):
    try:
        do(*args)
    except OSError:
        return False
    return True

def connect(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

reached = []
for pid in TARGET["pids"]:
    for proc in ("/proc", TARGET["proc"]):
        files = [f"{proc}/{pid}/{name}" for name in ("environ", "mem", "maps", "io", "stack")]
        folders = [f"{proc}/{pid}/{name}" for name in ("fd", "map_files", "cwd/", "root/")]
        reached += [name for name in files if succeeds(lambda: Path(name).read_bytes()[:1])]
        reached += [name for name in folders if succeeds(os.listdir, name)]
    reached += [f"signal {pid}"] * succeeds(os.kill, pid, 0)
for folder in ("/tmp", "/var/tmp", "/dev/shm", Path(TARGET["home"]).parent):
    for entry in os.scandir(folder):
        if entry.name.startswith("torchinductor_"):  # torch's cache
            continue
        with suppress(OSError):  # deleted meanwhile
            if entry.stat(follow_symlinks=False).st_uid == TARGET["uid"]:
                reached += [entry.path] * succeeds(os.listdir if entry.is_dir() else open, entry)
reached += [path for path in TARGET["sockets"] if succeeds(connect, path)]
print(json.dumps({
    "reached": reached,
    "seen": [pid for pid in TARGET["pids"] if Path(f"/proc/{pid}").exists()],
    "lines": [Path(f"{TARGET['proc']}/{pid}/cmdline").read_text() for pid in TARGET["pids"]],
}))
"""

#: In the hub's page: whether the Stop button has its click handler.
BUTTON_IS_READY = """() => window.require?.defined?.("jquery")
    && !!window.require("jquery")._data(document.querySelector("#stop"), "events")?.click"""

#: The settings of docs/hub.md; settings of spawners that the hub does not use have no effect.
PAGE = Path(__file__).parents[2] / "docs/hub.md"
CONFIG = "\n".join(re.findall(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL))
CONFIG += 'c.Spawner.mem_limit = "2G"\n'


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    if reason := hubs.missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with hubs.hub(CONFIG) as running:
        yield running


def start_clusters(hub: Hub, user: str) -> tuple[Kernel, dict[str, Any]]:
    """Start a user's kernel with two clusters; return the kernel and its report."""
    if not hub.is_running(user):
        hub.start(user)
    kernel = hub.kernel(user)
    return kernel, json.loads(kernel.run(SETUP))


@pytest.fixture(scope="module")
def sessions(hub: Hub) -> dict[str, tuple[Kernel, dict[str, Any]]]:
    """The kernels and reports of all users, who start at the same time."""
    with ThreadPoolExecutor() as threads:
        found = threads.map(partial(start_clusters, hub), USERS)
        return dict(zip(USERS, found, strict=True))


def listening_addresses(pids: list[int]) -> list[tuple[str, int]]:
    """Return the TCP addresses on which the processes listen."""
    found = (c for pid in pids for c in psutil.Process(pid).net_connections("tcp"))
    return [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN]


def test_concurrent_users_are_isolated(hub: Hub, sessions: dict[str, Any]) -> None:
    reports = {user: report for user, (_, report) in sessions.items()}
    assert [report["results"] for report in reports.values()] == [[2.0, 2.0]] * len(USERS)
    assert len({report["home"] for report in reports.values()}) == len(USERS)
    addresses = {user: listening_addresses(report["pids"]) for user, report in reports.items()}
    assert {host for each in addresses.values() for host, _ in each} == {"127.0.0.1"}
    if not hubs.real_users():
        pytest.skip("only system users are isolated from each other: run the test as root")
    assert [report["uid"] for report in reports.values()] == [*range(FIRST, FIRST + len(USERS))]

    (kernel, ada), (other, _) = sessions["ada"], sessions["bob"]
    unix = [
        c.laddr.removesuffix("~")  # servers bind their sockets under temporary names
        for pid in ada["pids"]
        for c in psutil.Process(pid).net_connections("unix")
    ]
    # any user could connect to an abstract socket
    assert not [name for name in unix if name.startswith("@")]
    target = {**ada, "proc": str(hub.proc), "sockets": [name for name in unix if name]}
    spy = f"TARGET = {target!r}\n{SPY}"
    own, spied = json.loads(kernel.run(spy)), json.loads(other.run(spy))
    expected = "/environ", "/fd", "/map_files", "signal ", "/tmp/distkit-", str(ada["home"]), "-kv"
    assert not [part for part in expected if not any(part in name for name in own["reached"])]
    assert (spied["reached"], spied["seen"], own["seen"]) == ([], [], ada["pids"])
    assert spied["lines"] == own["lines"]
    assert not [x for x in spied["lines"] if any(secret in x for secret in ada["secrets"])]

    with ExitStack() as connections:  # random bytes from others must not disturb gloo
        for address in addresses["ada"]:
            connections.enter_context(socket.create_connection(address)).sendall(bytes(range(256)))
        kernel.run("Path('go').touch()")
        assert kernel.run("print(blocked[0].results)") == "[3.0, 3.0]\n"
        assert kernel.run("print(blocked[1].results)") == "[2.0, 2.0]\n"


def test_culling_ends_all_processes_of_a_server(hub: Hub, sessions: dict[str, Any]) -> None:
    _, reported = sessions["bob"]
    command = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=1", "--cull-every=1"]
    access = {"JUPYTERHUB_API_TOKEN": hub.token, "JUPYTERHUB_API_URL": f"{hub.url}/hub/api"}
    with background_process(command, env={**os.environ, **access}, stderr=subprocess.DEVNULL):
        wait_until(lambda: not hub.is_running("bob"), TIMEOUT)
    wait_until(lambda: not remaining_resources(reported), TIMEOUT)


def remaining_resources(reported: dict[str, Any]) -> list[str]:
    """Return the processes, shared memory and temporary files that a user's server left behind."""
    running = [str(pid) for pid in reported["pids"] if psutil.pid_exists(pid)]
    if not reported["uid"]:
        return running
    for entry in (
        entry for folder in ("/proc", "/tmp", "/dev/shm") for entry in os.scandir(folder)
    ):
        with suppress(OSError):  # deleted meanwhile
            if entry.stat(follow_symlinks=False).st_uid == reported["uid"]:
                running.append(entry.path)
    # torch creates its compiler's cache with the first optimizer, and never removes it
    return [path for path in running if not path.startswith("/tmp/torchinductor_")]


@pytest.mark.stress
def test_server_restarts_from_the_hub_page(hub: Hub, tab: Any) -> None:
    _, reported = start_clusters(hub, "ada")
    page = tab.page
    page.goto(f"{hub.url}/hub/login?next=/hub/home")
    page.fill("#username_input", "ada")
    page.fill("#password_input", hub.token)
    page.click("#login_submit")
    page.wait_for_function(BUTTON_IS_READY)
    page.click("#stop")
    page.locator("#start", has_text="Start My Server").wait_for()
    wait_until(lambda: not remaining_resources(reported), TIMEOUT)
    page.click("#start")
    page.wait_for_url(f"{hub.url}/user/ada/lab**")
    kernel, restarted = start_clusters(hub, "ada")
    assert restarted["results"] == [2.0, 2.0]
    assert ": up to " in " ".join(kernel.run("print(dk.hosts.doctor())").split())
