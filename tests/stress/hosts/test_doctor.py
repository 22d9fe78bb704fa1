"""Each deliberate fault as a test, and healthy hosts."""

from __future__ import annotations

import pytest

from tests.stress.hosts.doctor import FAULTS, Fault, diagnose, verdict


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_doctor_names_the_fault_and_nothing_else(fault: Fault) -> None:
    checks = diagnose(fault)
    assert verdict(fault, checks), checks


def test_healthy_hosts_have_no_complaints() -> None:
    assert diagnose(Fault("nothing", "", "")) == []
