"""Clusters started by ipyparallel launchers on laboratory hosts, and failed starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from heads import Head
from laboratories import hide_folder, laboratory, run_shell, shrink_filesystem
from slurm import start_slurm
from waiting import wait_until

from distkit_hosts.laboratory import Laboratory
from distkit_hosts.laboratory.starting import PATH

#: Time limit of a failing start on a busy machine [s].
START_TIMEOUT = 30.0

#: Parts of the command lines of processes that a cluster starts on a host.
PROCESS_NAMES = ("remote.agent", "mpiexec", "orted", "srun", "sbatch", "ssh -", "slurmstepd")


def needs(program: str, package: str) -> None:
    if not shutil.which(program, path=PATH):
        pytest.skip(f"{program} is not installed ({package})")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the hosts share, as under Slurm."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def lab(home: Path) -> Iterator[Laboratory]:
    needs("sshd", "openssh-server")
    with laboratory(["alpha", "beta", "gamma"], shared=[home]) as lab:
        lab.ssh()
        yield lab


@pytest.fixture(scope="module")
def head(lab: Laboratory, home: Path) -> Iterator[Head]:
    allowed = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1")
    head = Head(lab, home, **allowed)
    yield head
    head.close()


@pytest.fixture
def hosts(lab: Laboratory) -> Iterator[Laboratory]:
    """The laboratory; each test must leave no process on the hosts."""
    yield lab
    lab.restore()
    wait_until(lambda: not remaining_processes(lab), timeout=20)


@pytest.fixture
def slurm(hosts: Laboratory) -> Iterator[Laboratory]:
    needs("slurmctld", "slurm-wlm")
    start_slurm(hosts)
    yield hosts
    hosts.restore()
    wait_until(lambda: not run_shell(hosts, "head", "squeue --noheader"), timeout=20)


def remaining_processes(lab: Laboratory) -> list[str]:
    """Return the processes of clusters on the hosts."""
    return [f"{host}: {line}" for host in lab.hosts for line in processes(lab, host)]


def processes(lab: Laboratory, host: str) -> list[str]:
    lines = run_shell(lab, host, "ps -eo args").splitlines()
    parts = [*PROCESS_NAMES, *(["imports.py"] if host != "head" else [])]  # not the running kernel
    return [line for line in lines if any(part in line for part in parts)]


def cluster(options: str) -> str:
    """Return a program that creates, uses and stops a cluster."""
    return f"""
with create(lambda: dk.Cluster({options})):
    assert cluster.run(total).results == [cluster.plan.ranks] * cluster.plan.ranks
    assert {{*cluster.run(os.getcwd).results}} == {{os.getcwd()}}
    send(hosts=hosts())
"""


def assert_start_fails(head: Head, options: str, *expected: str) -> None:
    """Assert that a cluster's start fails within the time limit, with these texts in the error."""
    last = head.run(cluster(options))
    assert last.get("kind") == "StartError", last
    for text in expected:
        assert text in last["error"]
    assert last["seconds"] < START_TIMEOUT, last


TWO_EACH = [host for host in ("alpha", "beta", "gamma") for _ in range(2)]
SSH = "hosts={'alpha': 2, 'beta': 2, 'gamma': 2}"


# -- SSH ------------------------------------------------------------------------------------


def command_lines(hosts: Laboratory) -> str:
    """Return the command lines of all processes on the hosts."""
    return "".join(
        run_shell(hosts, host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '") for host in hosts.hosts
    )


def test_ssh_starts_ranks_without_keys_in_command_lines(head: Head, hosts: Laboratory) -> None:
    assert "error" not in head.run(f"create(lambda: dk.Cluster({SSH}))")
    assert head.get("hosts()") == TWO_EACH
    assert head.get("cluster.run(total).results") == [6.0] * 6
    seen = command_lines(hosts)
    assert "remote.agent" in seen
    assert not [key for key in head.get("keys()") if key in seen]
    assert "error" not in head.run("cluster.stop()")
    assert not remaining_processes(hosts)  # immediately


def test_cluster_is_configured_by_the_site_environment(head: Head, hosts: Laboratory) -> None:
    head.run("""os.environ['DISTKIT_CLUSTER'] = '{"hosts": ["alpha", "beta"]}'""")
    head.start(cluster("3"))
    assert head.wait_for(lambda message: "hosts" in message)["hosts"] == ["alpha", "alpha", "beta"]
    assert "error" not in head.wait()
    assert "error" not in head.run("del os.environ['DISTKIT_CLUSTER']")


def test_unreachable_machines_are_all_reported(head: Head, hosts: Laboratory) -> None:
    hosts.cut("beta", "gamma")
    assert_start_fails(
        head,
        SSH,
        "beta cannot be reached",
        "gamma cannot be reached",
        "timed out",
        "distkit doctor --hosts gamma",
    )


def test_rejected_ssh_key_raises(head: Head, hosts: Laboratory) -> None:
    assert_start_fails(
        head, "hosts={'nobody@beta': 1}", "nobody@beta cannot be reached", "Permission denied"
    )


def test_machine_without_python_raises(head: Head, hosts: Laboratory) -> None:
    options = "hosts={'beta': 1}, remote_python='/opt/python'"
    assert_start_fails(head, options, "beta has no Python at /opt/python", "remote_python=")


def test_machine_without_distkit_raises(head: Head, hosts: Laboratory) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment, whose base Python lacks distkit")
    python = f"{sys.base_prefix}/bin/python3"
    options = f"hosts={{'beta': 1}}, remote_python={python!r}, environment={{'PYTHONPATH': ''}}"
    assert_start_fails(head, options, "the agent on beta", f"{python} -m pip install distkit")


def test_machine_without_torch_raises(head: Head, hosts: Laboratory) -> None:
    with hide_folder(hosts, "beta", Path(torch.__file__).parent):
        assert_start_fails(
            head, "hosts={'beta': 1}", "torch is not installed on beta", "-m pip install torch"
        )


def test_machine_without_disk_space_raises(head: Head, hosts: Laboratory) -> None:
    with shrink_filesystem(hosts, "beta", "/tmp"):
        assert_start_fails(head, "hosts={'beta': 1}", "on beta: ", "/tmp", "TMPDIR")


# -- MPI ------------------------------------------------------------------------------------


def test_mpi_ranks_are_numbered_by_machine(head: Head, hosts: Laboratory) -> None:
    needs("mpiexec", "openmpi-bin")
    options = "5, hosts=['alpha', 'beta', 'gamma'], engines='mpi'"
    assert "error" not in head.run(f"create(lambda: dk.Cluster({options}))")
    seen = command_lines(hosts)
    assert "orted" in seen
    assert not [key for key in head.get("keys()") if key in seen]
    assert head.get("hosts()") == ["alpha", "alpha", "beta", "beta", "gamma"]
    environ = "lambda: (os.uname().nodename, os.environ['RANK'], os.environ['LOCAL_RANK'])"
    found = head.get(f"cluster.run({environ}).results")
    assert found[1:4] == [["alpha", "1", "1"], ["beta", "2", "0"], ["beta", "3", "1"]]
    assert "error" not in head.run("cluster.stop()")


def test_mpiexec_error_is_reported(head: Head, hosts: Laboratory) -> None:
    needs("mpiexec", "openmpi-bin")
    assert_start_fails(
        head, "6, engines='mpi', mpi_args=['-H', 'alpha:1']", "mpi: ", "not enough slots"
    )


# -- Slurm ----------------------------------------------------------------------------------


def test_ranks_start_under_slurm(head: Head, slurm: Laboratory) -> None:
    assert "error" not in head.run("create(lambda: dk.Cluster(6, engines='slurm', timelimit=5))")
    assert head.get("hosts()") == TWO_EACH
    assert head.get("cluster.run(total).results") == [6.0] * 6
    assert run_shell(slurm, "head", "squeue --noheader --format='%j %l'") == "distkit 5:00"
    steps = run_shell(slurm, "head", "squeue --steps --noheader --format='%i %j'").splitlines()
    assert len([step for step in steps if step.endswith("python")]) == 1
    assert "error" not in head.run("cluster.stop()")
    assert not run_shell(slurm, "head", "squeue --noheader")
    assert not list(Path.home().glob(".distkit*"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("queue='nowhere'", "invalid partition specified: nowhere"),
        ("engine_cmd=['/opt/python']", "/opt/python: No such file"),
    ],
)
def test_slurm_error_is_reported(
    head: Head, slurm: Laboratory, options: str, expected: str
) -> None:
    assert_start_fails(head, f"2, engines='slurm', {options}", "slurm: ", expected)


def test_canceled_pending_job_raises(head: Head, slurm: Laboratory) -> None:
    head.start(cluster("2, engines='slurm', options='--begin=now+1hour', timeout=5"))
    stage = head.wait_for(lambda message: "PENDING" in message.get("stage", ""))["stage"]
    assert stage == "waiting for slurm (PENDING BeginTime): 0 of 2 have connected"
    run_shell(slurm, "head", "scancel --name=distkit")
    assert "is CANCELLED" in head.wait()["error"]


def test_pending_job_ends_with_its_kernel(lab: Laboratory, home: Path, slurm: Laboratory) -> None:
    kernel = Head(lab, home)
    kernel.start(cluster("2, engines='slurm', options='--begin=now+1hour'"))
    assert (
        "PENDING" in kernel.wait_for(lambda message: "PENDING" in message.get("stage", ""))["stage"]
    )
    kernel.kill()
    wait_until(lambda: not run_shell(slurm, "head", "squeue --noheader"), timeout=20)


def test_unreachable_node_is_named(head: Head, slurm: Laboratory) -> None:
    assert "error" not in head.run("create(lambda: dk.Cluster(6, engines='slurm'))")
    head.start("cluster.run(dist.recv, torch.ones(1), wait_forever=True)")
    slurm.cut("gamma")
    assert "gamma is lost, together with ranks 4 and 5" in head.wait()["error"]
    slurm.restore()
    head.run("cluster.stop()")


# -- attached engines -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def existing_engines(lab: Laboratory, home: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a controller on the head, two engines on alpha and one on beta."""
    quiet = {"cwd": home, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    address = lab.address("head")
    listen = [f"--profile-dir={home}/existing", f"--ip={address}", f"--location={address}"]
    python = [sys.executable, "-m"]
    processes = [lab.popen("head", [*python, "ipyparallel.controller", *listen], **quiet)]
    file = home / "existing" / "security" / "ipcontroller-engine.json"
    wait_until(file.exists, timeout=60)
    engine = [*python, "ipyparallel.engine", f"--file={file}"]
    processes += [lab.popen(host, engine, **quiet) for host in ("alpha", "alpha", "beta")]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


CLIENT = """
import ipyparallel
client = ipyparallel.Client("existing/security/ipcontroller-client.json")
client.wait_for_engines(3, timeout=60)
"""
ATTACH = f"{CLIENT}\ncreate(lambda: dk.Cluster.attach(client))"


def test_engine_without_distkit_raises(
    head: Head, hosts: Laboratory, existing_engines: object
) -> None:
    assert "error" not in head.run(
        CLIENT + "client[2].execute('import sys; sys.modules[\"distkit\"] = None').get()"
    )
    last = head.run(ATTACH)
    assert "engine 2 could not start an agent: " in last["error"]
    assert "-m pip install distkit" in last["error"]
    assert "error" not in head.run("client[2].execute('del sys.modules[\"distkit\"]').get()")


def test_ranks_end_with_their_engine(
    head: Head, hosts: Laboratory, existing_engines: list[subprocess.Popen[bytes]]
) -> None:
    assert "error" not in head.run(ATTACH)
    existing_engines[-1].kill()
    last = head.run("cluster.run(dist.recv, torch.ones(1), wait_forever=True)")
    assert "beta is lost" in last["error"]
    assert "the engine that started the agent has exited" in last["error"]
    head.run("cluster.stop()")
