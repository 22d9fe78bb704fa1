"""The laboratory's addresses, commands and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import Laboratory, plan, starting


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["al pha"], "invalid host names: 'al pha'"),
        (["localhost"], "'localhost' is reserved"),
        (["alpha", "alpha"], "'alpha, alpha'. .* different names"),
        ([], "1 to 200"),
    ],
)
def test_invalid_host_names_raise(hosts: list[str], message: str) -> None:
    with pytest.raises(LaboratoryError, match=message):
        Laboratory(hosts, head=None)


def test_fault_on_an_unknown_host_raises() -> None:
    with pytest.raises(
        LaboratoryError, match=r"host 'delta' does not exist. The hosts are head, alpha"
    ):
        Laboratory(["alpha"], skew={"delta": 5})


def test_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "PATH", "/nowhere")
    with pytest.raises(LaboratoryError, match=r"`ip`.*apt-get install iproute2"):
        Laboratory()


def test_unsupported_system_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaboratoryError, match="this is darwin"):
        Laboratory()


def test_missing_permission_names_the_remedy() -> None:
    assert "--privileged" in starting.explain("unshare(net): Operation not permitted")
    assert starting.explain("beta: no") == "the laboratory cannot be created: beta: no."


def test_hosts_share_the_current_and_requested_folders() -> None:
    assert {str(Path.cwd().resolve()), "/elsewhere"} <= set(plan.shared_folders(["/elsewhere"]))
