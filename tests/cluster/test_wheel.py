"""The wheel in a new environment, as after ``pip install distkit``."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import distkit
from distkit import demos


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of an environment with the wheel and this one's dependencies."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # pip installs into it from outside; editable installs are not visible there
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    bins = folder / "bin"
    install = ["--python", bins / "python", "install", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", "pip", *install, cwd=folder)
    return bins


def run(*command: object, cwd: Path) -> str:
    """Run a program outside the checkout; return its output."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [str(word) for word in command]
    ran = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_wheel_contains_distkit_and_companions(place: Path, tmp_path: Path) -> None:
    names = ["distkit", *distkit._HOMES, *distkit._MODULES.values()]
    code = f"import {', '.join(names)}\nfor name in {names}: print(eval(name).__file__)"
    found = run(place / "python", "-c", code, cwd=tmp_path).splitlines()
    assert len(found) == len(names)
    assert all(Path(where).is_relative_to(place.parent) for where in found)


def test_exercises_are_judged_without_a_checkout(place: Path, tmp_path: Path) -> None:
    (tmp_path / "ada.py").write_text("def bubble(p, m):\n    return (p - 1) / (m + p - 1)\n")
    message = run(place / "distkit", "grade", "ada.py", cwd=tmp_path)
    assert message.startswith("ada.py: 1 of 1 points")
    assert "rank 2" in run(place / "distkit", "answers", "00", cwd=tmp_path)


def test_demos_run_from_the_wheel(
    place: Path, tmp_path: Path, leftovers: Callable[[], list[str]]
) -> None:
    message = run(place / "distkit", "demo", "all", "--html", "demo.html", cwd=tmp_path)
    page = tmp_path.joinpath("demo.html").read_text(encoding="utf-8")
    assert not [name for name in demos.ALL if name not in message]
    assert page.count('<section id="panel') >= len(demos.ALL)
    assert not leftovers()
