"""Removed names raise an error that names the replacement."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import distkit as dk
from distkit import cli, kvstore
from distkit.cluster import Stepper
from distkit.gone import FORMER, GONE


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("export script lesson.ipynb train", "torchrun"),
        ("lab-hosts alpha beta", "lab.options"),
        ("doctor --port 45001", "free ports"),
        ("doctor --port=45001", "free ports"),
        ("progress reports", "JSON"),
        ("clusters --stop mine", "cluster.stop"),
        ("hang wrong_tag", "hangs.ALL"),
    ],
)
def test_removed_command_names_the_replacement(
    command: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("distkit: distkit ") and "was removed: " in said and instead in said


def test_removed_option_after_two_dashes_is_passed_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["replay", "no-such-file", "--", "doctor", "--port"])
    assert "was removed" not in capsys.readouterr().err


@pytest.mark.parametrize("name", FORMER)
def test_moved_name_works_with_a_warning(name: str) -> None:
    now = f"{FORMER[name]}.{name}".replace(".", r"\.")
    with pytest.warns(DeprecationWarning, match=f"distkit.{name} has moved: use {now} instead"):
        assert getattr(dk, name)


def test_removed_module_names_the_replacement() -> None:
    with pytest.raises(AttributeError, match=r"distkit.attach was removed: .*distkit trace"):
        dk.attach  # noqa: B018


def test_removed_name_names_the_replacement() -> None:
    with pytest.raises(AttributeError, match=r"measure_modes was removed: .*torch.compile"):
        dk.simulation.measure_modes  # noqa: B018


@pytest.mark.parametrize("name", [n for n in GONE if n.startswith("distkit.kvstore.")])
def test_removed_kvstore_name_names_the_replacement(name: str) -> None:
    with pytest.raises(AttributeError, match="was removed: "):
        getattr(kvstore, name.rpartition(".")[2])


@pytest.mark.parametrize("name", [n for n in GONE if n.startswith("Stepper.")])
def test_removed_method_of_a_stepper_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(AttributeError, match=r"was removed: .*stepper\."):
        getattr(Stepper.__new__(Stepper), name.rpartition(".")[2])


@pytest.mark.parametrize("name", [n for n in GONE if n.startswith(("KVStore.", "Trainer."))])
def test_removed_method_names_the_replacement(name: str) -> None:
    kind, _, method = name.partition(".")
    made = {
        "KVStore": kvstore.create("local"),
        "Trainer": kvstore.Trainer([torch.ones(1, requires_grad=True)]),
    }
    with pytest.raises(AttributeError, match=f"{name} was removed: "):
        getattr(made[kind], method)


def test_removed_option_names_the_replacement() -> None:
    with pytest.raises(TypeError, match=r"check_finite=…\) was removed: .*isfinite"):
        kvstore.create("dist_sync", check_finite=True)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"mps": "auto"}, "take turns"),
        ({"keep": "1h"}, "torch.save"),
        ({"name": "mine"}, "next kernel"),
        ({"ports": "45001-45009"}, "free ports"),
    ],
)
def test_removed_cluster_option_names_the_replacement(
    option: dict[str, Any], instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = option
    with pytest.raises(
        dk.errors.StartError, match=rf"dk.Cluster\({name}=…\) was removed: .*{instead}"
    ):
        dk.Cluster(2, **option)
    monkeypatch.setenv("DISTKIT_HOSTS", "alpha")
    monkeypatch.setenv("DISTKIT_OPTIONS", json.dumps(option))
    with pytest.raises(dk.errors.StartError, match="was removed"):
        dk.Cluster(2)
