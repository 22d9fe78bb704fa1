"""The doctor on real machines: this one, and stand-ins for hosts that a shell starts here."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable

import pytest
from laboratories import laboratory

import distkit as dk
from distkit import cli
from distkit.errors import DistkitError
from distkit_hosts.checkup.facts import Level
from distkit_hosts.laboratory.starting import PATH
from tests.stress.hosts import doctor as faults

#: Takes a host and a command line, as ssh does. Its hosts are this machine, in the words of a shell
#: that says something at login; those that it does not know fail as ssh would.
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


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert status == (0 if plain["good"] else 1)
    machine = plain["facts"]["machines"]["here"]
    assert machine["python"]["version"] == sys.version.split()[0]
    assert {"ranks", "backend"} <= {c["kind"] for c in plain["checks"]}


def test_hosts_by_a_stand_in(leftovers: Callable[[], list[str]]) -> None:
    """Everything but the network is real: these hosts are one machine, under names it lacks."""
    stages: list[str] = []
    hosts = ["alpha", "me@beta", "gamma"]
    report = dk.hosts.doctor(hosts, ssh_cmd=["bash", "-c", STAND_IN], say=stages.append)
    facts = report.facts
    assert list(facts.machines) == ["here", "alpha", "beta"]
    failures = kinds(report)
    assert failures["ssh.password"] == ("gamma",)
    assert failures["names.unknown"][-1] == "beta"  # nobody knows it
    assert not [kind for kind in failures if kind.startswith(("ways", "ports", "torch"))]
    assert {"ways", "versions", "home.shared", "clock"} <= set(kinds(report, Level.OK))
    ways = [facts.way(*way) for a, b in facts.pairs() for way in ((a, b), (b, a))]
    assert ways == [{"tcp": "", "arrived": True}] * 6
    assert all(abs(offset) <= error + 1e-3 for offset, error in facts.clocks.values())
    assert stages[-1] == "torch"
    assert not leftovers()


def test_a_python_that_is_not_there() -> None:
    reach = ["bash", "-c", STAND_IN]
    report = dk.hosts.doctor(["alpha"], ssh_cmd=reach, python="/no/such/python")
    assert set(kinds(report)) == {"python.missing"}


def test_what_cannot_be_examined_is_said() -> None:
    with pytest.raises(DistkitError, match="name each once"):
        dk.hosts.doctor(["alpha", "me@alpha"])
    with pytest.raises(DistkitError, match="there is no no-such-ssh here"):
        dk.hosts.doctor(["alpha"], ssh_cmd=["no-such-ssh"])


# -- in a laboratory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "one direction is lost",
        "torch is missing",
    ],
)
@needs_sshd
def test_deliberate_faults_are_named(name: str, leftovers: Callable[[], list[str]]) -> None:
    """`make stress` has all of them."""
    with laboratory(["alpha"]):
        pass  # skip where there can be none
    (fault,) = (fault for fault in faults.FAULTS if fault.name == name)
    checks = faults.diagnose(fault)
    assert faults.verdict(fault, checks), checks
    assert not leftovers()
