"""User files that shadow modules."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from distkit.imports import check, libraries


def test_distkit_imports_from_libraries_only(tmp_path: Path) -> None:
    mine, installed, copied = (tmp_path / name for name in ("mine", "installed", "copied"))
    for file in (
        mine / "random.py",
        installed / "some-1.0.dist-info" / "METADATA",
        copied / "torch" / "__init__.py",
    ):
        file.parent.mkdir(parents=True)
        file.touch()
    found = libraries(["", ".", str(mine), str(installed), *sys.path, str(copied), str(installed)])
    assert not {"", ".", str(mine)} & {*found}
    assert found[-1] == str(copied)
    position = {name: found.index(name) for name in found}
    # Python's own modules precede installed ones
    assert position[str(installed)] > position[str(Path(os.__file__).parent)]
    assert {p for p in sys.path if p.endswith("-packages")} <= {*found}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def shadow(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, name, raising=False)
    file = folder / f"{name}.py"
    file.write_text("mean = 1")
    return str(file)


def test_shadowing_is_checked_before_the_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("wave", "torch", "nowhere")
    file = shadow(folder, "wave", monkeypatch)
    with pytest.raises(ImportError, match="wave and shadows it: rename the file") as caught:
        check("torch", "wave")
    assert caught.value.path == file
    check("statistics")
    assert statistics  # it was imported before


def test_command_line_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("argparse", "random", "tempfile", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-m", "distkit", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert (result.returncode, result.stderr) == (0, "")
