"""Companion packages, used through distkit's names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from distkit.errors import CompanionError, DistkitError
from distkit.imports import load

ROOT = Path(__file__).parents[2]


def test_missing_companion_error_names_the_package() -> None:
    code = """if True:
        import sys
        class Missing:
            def find_spec(name, *_):
                if name in ("distkit_experiments", "distkit_hosts"):
                    raise ModuleNotFoundError(name=name)
        sys.meta_path.insert(0, Missing)
        import distkit as dk
        from distkit.errors import CompanionError
        for use in ("dk.Experiment", "from distkit import sweep", "dk.Experiment.sweep",
            "dk.Cluster(hosts={'alpha': 1})"):
            try:
                exec(use)
            except CompanionError as error:
                print(error)
        print(dk.Cluster.__name__, "Experiment" in dir(dk))
    """
    ran = subprocess.run(
        [sys.executable, "-Werror", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    *messages, hosts, last = ran.stdout.splitlines()
    assert hosts.startswith("distkit_hosts is not installed.")
    assert len(messages) == 3 and {*messages} == {messages[0]} and last == "Cluster True"
    assert re.match(r"distkit_experiments is not installed\..*pip install", messages[0])


def test_missing_dependency_of_a_companion_is_named() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        load("distkit_experiments.nothing_of_this_name")
    assert not isinstance(caught.value, CompanionError) and issubclass(CompanionError, DistkitError)
