"""Machines requested by a call or by a site's environment variable."""

from __future__ import annotations

from typing import Any

import pytest

from distkit.errors import StartError
from distkit_hosts.remote.site import distribute, request


def requested(*call: Any) -> tuple[Any, ...]:
    found = request(*call)
    return found.ranks, found.engines, found.options


def test_site_configuration_names_machines_and_launcher() -> None:
    site = '{"engines": "mpi", "hosts": ["alpha", "beta"], "mpi_cmd": ["mpirun"]}'
    options = {"mpi_cmd": ["mpirun"], "mpi_hosts": {"alpha": 2, "beta": 1}}
    assert requested(3, None, "", {}, site) == (3, "mpi", options)
    assert requested(None, None, "", {}, '{"engines": "slurm"}') == (4, "slurm", {})


def test_site_configuration_overrides_defaults() -> None:
    site = '{"engines": "slurm", "timeout": 90, "qos": "low"}'
    found = request(2, None, "", {}, site, timeout=60.0)
    assert found.timeout == 90 and found.options == {"qos": "low"}


def test_call_overrides_the_site_configuration() -> None:
    site = '{"engines": "slurm", "qos": "low"}'
    assert requested(2, None, "", {"qos": "high"}, site) == (2, "slurm", {"qos": "high"})
    assert requested(None, {"delta": 2}, "", {}, site) == ({"delta": 2}, "ssh", {})
    assert requested(2, None, "pbs", {}, site) == (2, "pbs", {})


def test_ranks_are_assigned_in_blocks() -> None:
    assert distribute(5, ["a", "b", "c"]) == {"a": 2, "b": 2, "c": 1}
    assert distribute(2, ["a", "b", "c"]) == {"a": 1, "b": 1}
    assert requested(3, ["a", "b"], "", {}) == ({"a": 2, "b": 1}, "ssh", {})


@pytest.mark.parametrize(
    ("ranks", "hosts", "engines", "site", "expected"),
    [
        (4, {"alpha": 2}, "", "", "not both"),
        (None, {"alpha": 0}, "", "", "at least one rank"),
        (None, {}, "", "", "at least one machine"),
        (0, ["alpha"], "", "", "at least 1 rank"),
        ("4", ["alpha"], "", "", "integer"),
        (4, None, "ssh", "", "needs machines"),
        (4, None, "", '{"engines": "slurm", "hosts": ["alpha"]}', "'slurm' selects the machines"),
        (4, {"alpha": 2}, "slurm", "", "not both"),
        (4, None, "", "{qos", "DISTKIT_CLUSTER='{qos' is not a JSON object"),
        (4, None, "", "[1]", "not a JSON object"),
    ],
)
def test_invalid_request_raises(
    ranks: int, hosts: dict[str, int] | None, engines: str, site: str, expected: str
) -> None:
    with pytest.raises(StartError) as caught:
        requested(ranks, hosts, engines, {}, site)
    assert expected in str(caught.value)
