"""What was removed says in one sentence what to do instead."""

from __future__ import annotations

import pytest
import torch

import distkit as dk
from distkit import cli, kvstore
from distkit.gone import GONE


@pytest.mark.parametrize(
    ("command", "instead"),
    [("export script lesson.ipynb train", "torchrun"), ("lab-hosts --forward 8888", "as root")],
)
def test_a_removed_command_says_what_to_do_instead(
    command: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("distkit: distkit ") and "was removed: " in said and instead in said


def test_a_removed_name_says_what_to_do_instead() -> None:
    with pytest.raises(AttributeError, match=r"measure_modes was removed: .*torch.compile"):
        dk.simulation.measure_modes  # noqa: B018


@pytest.mark.parametrize("name", [n for n in GONE if n.startswith("distkit.kvstore.")])
def test_a_removed_name_of_kvstore_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(AttributeError, match="was removed: "):
        getattr(kvstore, name.rpartition(".")[2])


@pytest.mark.parametrize("name", [n for n in GONE if n.startswith(("KVStore.", "Trainer."))])
def test_a_removed_method_says_what_to_do_instead(name: str) -> None:
    kind, _, method = name.partition(".")
    made = {
        "KVStore": kvstore.create("local"),
        "Trainer": kvstore.Trainer([torch.ones(1, requires_grad=True)]),
    }
    with pytest.raises(AttributeError, match=f"{name} was removed: "):
        getattr(made[kind], method)


def test_a_removed_option_says_what_to_do_instead() -> None:
    with pytest.raises(dk.KVStoreError, match=r"check_finite=…\) was removed: .*isfinite"):
        kvstore.create("dist_sync", check_finite=True)
    with pytest.raises(dk.StartError, match=r"ports=…\) was removed: .*free ports"):
        dk.Cluster(2, ports=range(4000, 4010))
