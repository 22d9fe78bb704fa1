"""Laboratories: isolated hosts on this machine, and their removal."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from laboratories import laboratory, namespace, needs, processes_in, run_shell
from waiting import wait_until

import distkit as dk
from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import Laboratory

ROOT = Path(__file__).parents[2]
AS_ROOT = os.geteuid() == 0

needs_sshd = needs("sshd", "openssh-server")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Laboratory]:
    with laboratory(["alpha", "beta", "gamma"]) as lab:
        yield lab


@pytest.fixture
def restored(hosts: Laboratory) -> Iterator[Laboratory]:
    """The hosts, whose faults are removed after each test."""
    yield hosts
    hosts.restore()


def test_hosts_are_isolated(hosts: Laboratory) -> None:
    here = socket.gethostname()
    for host in hosts.hosts:
        assert run_shell(hosts, host, "hostname") == host != here
        run_shell(hosts, host, f"echo {host} | tee /dev/shm/who /tmp/who /run/who")
        assert hosts.address(host) in run_shell(hosts, host, "cat /proc/net/fib_trie")
        assert run_shell(hosts, host, "ls /sys/class/net").split() == ["eth0", "lo"]
    for host in hosts.hosts:
        assert set(run_shell(hosts, host, "cat /dev/shm/who /tmp/who /run/who").split()) == {host}
    assert not Path("/dev/shm/who").exists()


def test_hosts_resolve_names_and_unknown_hosts_raise(hosts: Laboratory) -> None:
    assert run_shell(hosts, "alpha", "getent hosts beta").split() == [hosts.address("beta"), "beta"]
    assert (
        run_shell(hosts, "beta", "echo $COLOR; pwd", cwd="/usr", env={"COLOR": "red"})
        == "red\n/usr"
    )
    with pytest.raises(LaboratoryError, match="host 'delta' does not exist"):
        hosts.run("delta", ["true"])


def test_terminating_popen_ends_the_command_on_the_host(hosts: Laboratory) -> None:
    with hosts.popen("alpha", ["sleep", "1000"]) as sleeper:
        wait_until(
            lambda: "sleep" in run_shell(hosts, "alpha", "cat /proc/[0-9]*/comm 2>/dev/null; true")
        )
        sleeper.terminate()
    wait_until(
        lambda: "sleep" not in run_shell(hosts, "alpha", "cat /proc/[0-9]*/comm 2>/dev/null; true")
    )


def can_reach(lab: Laboratory, source: str, to: str, port: int = 7000) -> bool:
    """Return whether one host can connect to a server on another within a second."""
    serve = f"""if True:
        import socket
        server = socket.create_server(("{lab.address(to)}", {port}))
        print("ready", flush=True)
        print(server.accept()[0].recv(9))
    """
    send = f"""if True:
        import socket
        socket.create_connection(("{to}", {port}), timeout=1).sendall(b"hello")
    """
    python = [sys.executable, "-IS", "-c"]
    with lab.popen(to, [*python, serve], stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline()
        sent = lab.run(source, [*python, send], stderr=subprocess.DEVNULL)
        server.kill()
    return bool(sent.returncode == 0)


def test_cut_host_is_unreachable_until_restored(restored: Laboratory) -> None:
    restored.cut("beta")
    assert not can_reach(restored, "alpha", "beta")
    assert can_reach(restored, "alpha", "gamma")
    restored.restore()
    assert can_reach(restored, "alpha", "beta")


def test_crashed_host_does_not_close_its_connections() -> None:
    """If only the processes ended, the host's kernel would close their connections."""
    serve = """if True:
        import socket
        server = socket.create_server(("alpha", 7000))
        print("ready", flush=True)
        connection = server.accept()[0]
        connection.recv(1)
        print("connected", flush=True)
        input()
        connection.settimeout(1)
        connection.recv(1)
    """
    stay = """if True:
        import socket
        connection = socket.create_connection(("alpha", 7000))
        connection.sendall(b".")
        connection.recv(1)
    """
    python = [sys.executable, "-IS", "-c"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with laboratory(["alpha", "beta"], head=None) as lab:
        with lab.popen("alpha", [*python, serve], text=True, **pipes) as server:
            assert server.stdout and server.stdout.readline()
            with lab.popen("beta", [*python, stay], text=True, **pipes) as client:
                assert server.stdout.readline() == "connected\n"
                lab.crash("beta")
                assert client.wait(20)
            assert "TimeoutError" in server.communicate("crashed\n")[1]
        with pytest.raises(LaboratoryError, match="beta has crashed"):
            lab.run("beta", ["true"])
        lab.restore()


# -- removal -------------------------------------------------------------------------------------


CREATOR = """if True:
    import json, shutil, signal, sys
    from distkit_hosts.laboratory import Laboratory
    from distkit_hosts.laboratory.starting import PATH
    lab = Laboratory(["alpha", "beta"])
    if shutil.which("sshd", path=PATH):
        lab.ssh()
    for host in lab.hosts:
        lab.run(host, ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"])
    print(json.dumps([lab._init.pid, *lab._pids.values()]), lab.folder, flush=True)
    signal.pause()
"""


def start_creator(command: list[str]) -> tuple[subprocess.Popen[str], set[int], Path]:
    """Start a process that creates a laboratory; return it, the namespaces and the folder."""
    creator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert creator.stdout
    pids, _, folder = creator.stdout.readline().rpartition(" ")
    if not pids:
        creator.wait()
        pytest.skip("a laboratory cannot be created here")
    return creator, {namespace(pid) for pid in json.loads(pids)}, Path(folder.strip())


def test_no_process_is_left_when_the_creator_is_killed() -> None:
    creator, namespaces, folder = start_creator([sys.executable, "-c", CREATOR])
    assert len(processes_in(namespaces)) >= 7
    creator.kill()
    creator.communicate()
    wait_until(lambda: not processes_in(namespaces), 30)
    wait_until(lambda: not folder.exists(), 30)


@pytest.mark.skipif(not AS_ROOT, reason="without root, all tests run as an ordinary user")
def test_unprivileged_user_can_create_hosts(tmp_path: Path) -> None:
    """Uses the system's Python, because root's may be unreadable to other users."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    nobody = pwd.getpwnam("nobody")
    as_nobody = [
        "setpriv",
        f"--reuid={nobody.pw_uid}",
        f"--regid={nobody.pw_gid}",
        "--clear-groups",
    ]
    creator = [
        *as_nobody,
        "env",
        "HOME=/nowhere",
        "PYTHONDONTWRITEBYTECODE=1",
        f"PYTHONPATH={ROOT}:{ROOT}/companions",
    ]
    probe = subprocess.run([*creator, str(python), "-c", "import distkit"], cwd="/")
    if not python or probe.returncode:
        pytest.skip("no Python here can be run by an ordinary user")
    process, namespaces, folder = start_creator([*creator, python, "-c", CREATOR])
    assert len(processes_in(namespaces)) >= 7
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_in(namespaces) and not folder.exists(), 30)


@needs_sshd
def test_cluster_outside_the_laboratory_runs_on_its_hosts(
    restored: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is on another network, so it listens on a socket of the laboratory's head."""
    # three processes import torch at the same time, which takes minutes on a busy machine
    monkeypatch.setattr("distkit.cluster.processes.fork_client.RESPONSE_TIMEOUT", 300.0)
    hosts = {"alpha": 1, "beta": 1}
    with dk.Cluster(hosts=hosts, timeout=300, **restored.options()) as cluster:
        assert cluster.run(socket.gethostname).results == ["alpha", "beta"]
        (listening,) = [
            end
            for end in run_shell(restored, "head", "ss -Htln").split()
            if restored.address("head") in end
        ]
        assert listening.endswith(f":{restored.options()['interface'].getsockname()[1]}")
