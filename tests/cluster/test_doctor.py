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

#: A fake ssh: runs the command line in a local shell that prints a login banner; unknown hosts fail
#: like ssh.
STAND_IN = """
case "${0#*@}" in
  alpha|beta) echo "Welcome to $0"; exec sh -c "$1";;
  mute) exec sleep 60;;
  *) echo "$0: Permission denied (publickey,password)." >&2; exit 255;;
esac
"""


needs_sshd = pytest.mark.skipif(
    not shutil.which("sshd", path=PATH), reason="there is no sshd here (openssh-server)"
)


def kinds(report: object, level: Level = Level.FAILURE) -> dict[str, tuple[str, ...]]:
    return {check.kind: check.hosts for check in report.checks if check.level is level}


def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert status == (0 if plain["ok"] else 1)
    machine = plain["facts"]["machines"]["here"]
    assert machine["python"]["version"] == sys.version.split()[0]
    assert {"ranks", "backend"} <= {c["kind"] for c in plain["checks"]}


def test_hosts_are_examined_through_a_fake_ssh(leftovers: Callable[[], list[str]]) -> None:
    """The hosts are this machine under unknown names; everything but the network is real."""
    hosts = ["alpha", "me@beta", "gamma"]
    report = dk.hosts.doctor(hosts, ssh_cmd=["bash", "-c", STAND_IN])
    facts = report.facts
    assert list(facts.machines) == ["here", "alpha", "beta"]
    failures = kinds(report)
    assert failures["ssh.password"] == ("gamma",)
    assert failures["names.unknown"][-1] == "beta"  # an unknown name
    assert not [kind for kind in failures if kind.startswith(("connections", "ports", "torch"))]
    assert {"connections", "versions", "folder.shared"} <= set(kinds(report, Level.OK))
    ways = [facts.connection(*pair) for pair in permutations(facts.machines, 2)]
    assert ways == [{"tcp": "", "arrived": True}] * 6
    assert not leftovers()


def test_missing_python_is_reported() -> None:
    reach = ["bash", "-c", STAND_IN]
    report = dk.hosts.doctor(["alpha"], ssh_cmd=reach, python="/no/such/python")
    assert set(kinds(report)) == {"python.missing"}


def test_unreachable_host_is_reported() -> None:
    with pytest.raises(DistkitError, match="name each once"):
        dk.hosts.doctor(["alpha", "me@alpha"])
    with pytest.raises(DistkitError, match="no-such-ssh is not installed here"):
        dk.hosts.doctor(["alpha"], ssh_cmd=["no-such-ssh"])


# -- in a laboratory -------------------------------------------------------------------------------


@needs_sshd
def test_injected_fault_is_named(leftovers: Callable[[], list[str]]) -> None:
    """`make stress` injects all faults."""
    with laboratory(["alpha"]):
        pass  # skip where there can be none
    (fault,) = (fault for fault in faults.FAULTS if fault.name == "one direction is lost")
    checks = faults.diagnose(fault)
    assert faults.verdict(fault, checks), checks
    assert not leftovers()
