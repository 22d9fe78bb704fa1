"""The doctor on this machine, and on hosts simulated by a local shell."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from itertools import permutations

import pytest
from laboratories import laboratory

import distkit as dk
from distkit import cli
from distkit.errors import DistkitError
from distkit_hosts.checkup.facts import Level
from distkit_hosts.laboratory.starting import PATH
from tests.stress.hosts import doctor as faults

#: A fake ssh, which prints a login banner and runs the command in a local shell. For unknown hosts,
#: it fails as ssh does.
FAKE_SSH = """
case "${0#*@}" in
  alpha|beta) echo "Welcome to $0"; exec sh -c "$1";;
  *) echo "$0: Permission denied (publickey,password)." >&2; exit 255;;
esac
"""


needs_sshd = pytest.mark.skipif(
    not shutil.which("sshd", path=PATH), reason="sshd is not installed (openssh-server)"
)


def hosts_by_kind(report: object, level: Level = Level.FAILURE) -> dict[str, tuple[str, ...]]:
    return {check.kind: check.hosts for check in report.checks if check.level is level}


def test_doctor_examines_the_local_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["ok"] else 1)
    assert report["facts"]["machines"]["here"]["python"]["version"] == sys.version.split()[0]
    assert {"ranks", "backend"} <= {c["kind"] for c in report["checks"]}


def test_doctor_examines_hosts_over_ssh(leftovers: Callable[[], list[str]]) -> None:
    """The hosts are this machine under names that do not resolve; only the network is fake."""
    report = dk.hosts.doctor(["alpha", "me@beta", "gamma"], ssh_cmd=["bash", "-c", FAKE_SSH])
    facts = report.facts
    assert list(facts.machines) == ["here", "alpha", "beta"]
    failures = hosts_by_kind(report)
    assert failures["ssh.password"] == ("gamma",)
    assert failures["names.unknown"][-1] == "beta"
    assert not [kind for kind in failures if kind.startswith(("connections", "ports", "torch"))]
    assert {"connections", "versions", "folder.shared"} <= set(hosts_by_kind(report, Level.OK))
    routes = [facts.connection(*pair) for pair in permutations(facts.machines, 2)]
    assert routes == [{"tcp": "", "arrived": True}] * 6
    assert not leftovers()


def test_missing_python_is_reported() -> None:
    ssh = ["bash", "-c", FAKE_SSH]
    report = dk.hosts.doctor(["alpha"], ssh_cmd=ssh, python="/no/such/python")
    assert set(hosts_by_kind(report)) == {"python.missing"}


def test_duplicate_hosts_and_missing_ssh_raise() -> None:
    with pytest.raises(DistkitError, match="name each once"):
        dk.hosts.doctor(["alpha", "me@alpha"])
    with pytest.raises(DistkitError, match="no-such-ssh is not installed here"):
        dk.hosts.doctor(["alpha"], ssh_cmd=["no-such-ssh"])


# -- in a laboratory -------------------------------------------------------------------------------


@needs_sshd
def test_doctor_finds_an_injected_fault(leftovers: Callable[[], list[str]]) -> None:
    """``make stress`` injects all faults."""
    with laboratory(["alpha"]):
        pass  # skips the test if a laboratory cannot be created
    (fault,) = (fault for fault in faults.FAULTS if fault.name == "one direction is lost")
    checks = faults.diagnose(fault)
    assert faults.verdict(fault, checks), checks
    assert not leftovers()
