"""Where namespaces are not allowed or OpenSSH is missing, these tests are skipped."""

from __future__ import annotations

import pytest

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import Laboratory


@pytest.fixture(scope="session", autouse=True)
def laboratories() -> None:
    """See whether there can be any."""
    try:
        with Laboratory(["alpha"]) as lab:
            lab.ssh()
    except LaboratoryError as error:
        pytest.skip(str(error))
