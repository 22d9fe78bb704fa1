"""The laboratory's addresses, commands and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import Laboratory, plan, starting


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (("port1", None, None), "iif port1 blackhole"),
        ((None, "198.18.0.2", None), "to 198.18.0.2 blackhole"),
        (("port0", "198.18.0.3", 22), "iif port0 to 198.18.0.3 ipproto tcp dport 22 blackhole"),
    ],
)
def test_rules(fault: tuple[str | None, str | None, int | None], words: str) -> None:
    assert plan.rule(*fault) == words


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["al pha"], "'al pha' cannot be a host's name"),
        (["localhost"], "has a meaning already"),
        (["alpha", "alpha"], "two hosts 'alpha'"),
        ([], "1 to 200 hosts; got 0"),
    ],
)
def test_names_that_cannot_be(hosts: list[str], words: str) -> None:
    with pytest.raises(LaboratoryError, match=words):
        Laboratory(hosts, head=None)


def test_a_fault_of_a_host_that_is_not_there() -> None:
    with pytest.raises(LaboratoryError, match=r"no host 'delta'. Hosts: head, alpha"):
        Laboratory(["alpha"], skew={"delta": 5})


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "PATH", "/nowhere")
    with pytest.raises(LaboratoryError, match=r"`ip`.*apt-get install iproute2"):
        Laboratory()


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaboratoryError, match="this is darwin"):
        Laboratory()


def test_what_is_forbidden_has_a_remedy() -> None:
    assert "--privileged" in starting.explain("unshare(net): Operation not permitted")
    assert starting.explain("beta: no") == "the laboratory cannot be made: beta: no."


def test_all_hosts_see_the_current_folder_and_what_was_asked_for() -> None:
    assert {str(Path.cwd().resolve()), "/elsewhere"} <= set(plan.shared_folders(["/elsewhere"]))
