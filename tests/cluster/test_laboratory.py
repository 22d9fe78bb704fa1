"""Several isolated hosts on this machine, removed afterwards."""

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
from laboratories import inhabitants, laboratory, namespace, needs, say
from waiting import until

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
        assert say(hosts, host, "hostname") == host != here
        say(hosts, host, f"echo {host} | tee /dev/shm/who /tmp/who /run/who")
        addresses = say(hosts, host, "cat /proc/net/fib_trie")
        assert hosts.address(host) in addresses
        assert say(hosts, host, "ls /sys/class/net").split() == ["eth0", "lo"]
    for host in hosts.hosts:
        assert set(say(hosts, host, "cat /dev/shm/who /tmp/who /run/who").split()) == {host}
    assert not Path("/dev/shm/who").exists()


def test_names_resolve_and_options_are_checked(hosts: Laboratory) -> None:
    assert say(hosts, "alpha", "getent hosts beta").split() == [hosts.address("beta"), "beta"]
    assert say(hosts, "beta", "echo $COLOUR; pwd", cwd="/usr", env={"COLOUR": "red"}) == "red\n/usr"
    with pytest.raises(LaboratoryError, match="no host 'delta'"):
        hosts.run("delta", ["true"])


def test_command_ends_with_its_proxy(hosts: Laboratory) -> None:
    with hosts.popen("alpha", ["sleep", "1000"]) as sleeper:
        until(lambda: "sleep" in say(hosts, "alpha", "cat /proc/[0-9]*/comm 2>/dev/null; true"))
        sleeper.terminate()
    until(lambda: "sleep" not in say(hosts, "alpha", "cat /proc/[0-9]*/comm 2>/dev/null; true"))


def reach(lab: Laboratory, source: str, to: str, port: int = 7000) -> bool:
    """Return whether a server on one host receives another host's message within a second."""
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


def test_cut_and_restore(restored: Laboratory) -> None:
    restored.cut("beta")
    assert not reach(restored, "alpha", "beta")
    assert reach(restored, "alpha", "gamma")
    restored.restore()
    assert reach(restored, "alpha", "beta")


def test_host_crashes_silently() -> None:
    """Its peers do not see their connections end, as they would if only its processes ended."""
    serve = """if True:
        import socket
        server = socket.create_server(("alpha", 7000))
        print("ready", flush=True)
        line = server.accept()[0]
        line.recv(1)
        print("connected", flush=True)
        input()
        line.settimeout(1)
        line.recv(1)
    """
    stay = """if True:
        import socket
        line = socket.create_connection(("alpha", 7000))
        line.sendall(b".")
        line.recv(1)
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


# -- the end -------------------------------------------------------------------------------------


MAKER = """if True:
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


def started(command: list[str]) -> tuple[subprocess.Popen[str], set[int], Path]:
    """Start a process that creates a laboratory; return its namespaces and folder."""
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert maker.stdout
    pids, _, folder = maker.stdout.readline().rpartition(" ")
    if not pids:
        maker.wait()
        pytest.skip("there can be no laboratory here")
    return maker, {namespace(pid) for pid in json.loads(pids)}, Path(folder.strip())


def test_no_process_is_left_when_the_creator_is_killed() -> None:
    maker, namespaces, folder = started([sys.executable, "-c", MAKER])
    assert len(inhabitants(namespaces)) >= 7
    maker.kill()
    maker.communicate()
    until(lambda: not inhabitants(namespaces), 30)
    until(lambda: not folder.exists(), 30)


@pytest.mark.skipif(not AS_ROOT, reason="the other tests are those of an ordinary user")
def test_unprivileged_user_can_create_hosts(tmp_path: Path) -> None:
    """Uses the system's Python, since root's may be unreadable for others."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    nobody = pwd.getpwnam("nobody")
    become = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    maker = [
        *become,
        "env",
        "HOME=/nowhere",
        "PYTHONDONTWRITEBYTECODE=1",
        f"PYTHONPATH={ROOT}:{ROOT}/companions",
    ]
    probe = subprocess.run([*maker, str(python), "-c", "import distkit"], cwd="/")
    if not python or probe.returncode:
        pytest.skip("no Python here that an ordinary user can run")
    process, namespaces, folder = started([*maker, python, "-c", MAKER])
    assert len(inhabitants(namespaces)) >= 7
    process.kill()
    process.communicate()
    until(lambda: not inhabitants(namespaces) and not folder.exists(), 30)


@needs_sshd
def test_outside_cluster_has_ranks_on_the_hosts(restored: Laboratory) -> None:
    """The networks are not connected: the cluster uses a socket of the head."""
    with dk.Cluster(hosts={"alpha": 1, "beta": 1}, **restored.options()) as cluster:
        assert cluster.run(socket.gethostname).results == ["alpha", "beta"]
        (listening,) = [
            end
            for end in say(restored, "head", "ss -Htln").split()
            if restored.address("head") in end
        ]
        assert listening.endswith(f":{restored.options()['interface'].getsockname()[1]}")
