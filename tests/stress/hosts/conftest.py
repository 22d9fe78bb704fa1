"""Skips these tests if namespaces are not allowed or OpenSSH is not installed."""

from __future__ import annotations

import pytest

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import Laboratory


@pytest.fixture(scope="session", autouse=True)
def laboratories() -> None:
    """Skip the tests if a laboratory cannot be created."""
    try:
        with Laboratory(["alpha"]) as lab:
            lab.ssh()
    except LaboratoryError as error:
        pytest.skip(str(error))
