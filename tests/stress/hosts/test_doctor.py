"""The doctor on hosts with each of the faults, and on healthy hosts."""

from __future__ import annotations

import pytest

from tests.stress.hosts.doctor import FAULTS, Fault, diagnose, verdict


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_doctor_reports_the_fault_and_nothing_else(fault: Fault) -> None:
    checks = diagnose(fault)
    assert verdict(fault, checks), checks


def test_doctor_reports_nothing_on_healthy_hosts() -> None:
    assert diagnose(Fault("nothing", "", "")) == []
