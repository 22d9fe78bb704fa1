"""The wheel, installed into a new environment."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import distkit


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment with the wheel and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # packages of this environment are importable there, except editable ones
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    bins = folder / "bin"
    install = ["--python", bins / "python", "install", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", "pip", *install, cwd=folder)
    return bins


def run(*command: object, cwd: Path) -> str:
    """Run a program outside the checkout; return its output."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    arguments = [str(argument) for argument in command]
    completed = subprocess.run(
        arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=280
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_wheel_contains_distkit_and_companions(bin_folder: Path, tmp_path: Path) -> None:
    names = ["distkit", *distkit._EXPORTS, *distkit._MODULES.values()]
    code = f"import {', '.join(names)}\nfor name in {names}: print(eval(name).__file__)"
    found = run(bin_folder / "python", "-c", code, cwd=tmp_path).splitlines()
    assert len(found) == len(names)
    assert all(Path(path).is_relative_to(bin_folder.parent) for path in found)


def test_exercises_are_graded_without_a_checkout(bin_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ada.py").write_text("def bubble(p, m):\n    return (p - 1) / (m + p - 1)\n")
    message = run(bin_folder / "distkit", "grade", "ada.py", cwd=tmp_path)
    assert message.startswith("ada.py: 1 of 1 points")
    assert "rank 2" in run(bin_folder / "distkit", "answers", "00", cwd=tmp_path)


def test_demos_run_from_the_wheel(
    bin_folder: Path, tmp_path: Path, leftovers: Callable[[], list[str]]
) -> None:
    message = run(bin_folder / "distkit", "demo", "all", "--html", "demo.html", cwd=tmp_path)
    page = tmp_path.joinpath("demo.html").read_text(encoding="utf-8")
    assert not [name for name in distkit.demos.ALL if name not in message]
    assert page.count('<section id="panel') >= len(distkit.demos.ALL)
    assert not leftovers()
