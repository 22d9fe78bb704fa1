"""The project: import layers, public names, style, documentation and metadata."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from statistics import quantiles

import pytest

import distkit

ROOT = Path(__file__).parents[2]
PACKAGE, COMPANIONS = ROOT / "distkit", ROOT / "companions"
CORE_MODULES, COMPANION_MODULES = sorted(PACKAGE.rglob("*.py")), sorted(COMPANIONS.rglob("*.py"))
MODULES = [*CORE_MODULES, *COMPANION_MODULES]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.joinpath("docs").rglob("*.md")])

# Imports point down: each module of distkit, and the other modules that it may import.
SHARED = "errors events consistency imports trace _format "
LAYERS = {
    "_format": "",
    "errors": "",
    "imports": "errors",
    "events": "",
    "consistency": "",
    "trace": "errors events imports consistency _format",
    "diagnosis": SHARED,
    "algorithms": SHARED,
    "data": SHARED,
    "recording": SHARED,
    "views": SHARED + "diagnosis algorithms",
    "kvstore": SHARED + "recording",
    # it runs the roles of a KVStore, and a Run displays itself
    "cluster": SHARED + "recording diagnosis kvstore views",
}
TOP = {
    "__init__",
    "__main__",
    "cli",
    "ipython",
}  # these may import everything
# The other companions that each companion may import; all may import distkit.
USES = {
    "distkit_course": "distkit_parallel distkit_simulation",
    "distkit_examples": "",
    "distkit_experiments": "",
    "distkit_hosts": "",
    "distkit_parallel": "",
    "distkit_simulation": "distkit_parallel",
    "distkit_strategies": "",
}


# -- imports ---------------------------------------------------------------------


def nodes(tree: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """Yield a file's nodes; unless ``lazy``, omit functions and ``if`` statements."""
    for node in ast.iter_child_nodes(tree):
        if lazy or not isinstance(node, ast.FunctionDef | ast.If):
            yield node
            yield from nodes(node, lazy)


def imports(path: Path, lazy: bool = True) -> set[str]:
    """Return the full names that a file imports; ``lazy`` includes imports in functions."""
    found = set()
    for node in nodes(ast.parse(path.read_text()), lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def companion(module: str) -> str:
    """Return the companion that an import belongs to, or "" for other packages."""
    package = module.partition(".")[0]
    return package if package in USES else ""


@pytest.mark.parametrize(
    "path",
    [path for path in CORE_MODULES if top_module(path) not in TOP],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_imports_follow_the_layers(path: Path) -> None:
    here = top_module(path)
    lazy = path.name != "trace.py"  # only methods of a Trace, such as to_html(), import upward
    ours = {name for name in imports(path, lazy) if name.startswith("distkit.")}
    assert not {name for name in ours if name.split(".")[1] not in {here, *LAYERS[here].split()}}


def test_each_companion_is_registered_and_declares_its_imports() -> None:
    packages = {path.name for path in COMPANIONS.iterdir() if list(path.glob("*.py"))}
    assert packages == {*USES}
    modules = {*distkit._EXPORTS, *distkit._MODULES.values(), *distkit.algorithms._EXPORTS}
    assert packages == {module.partition(".")[0] for module in modules} - {"distkit"}
    assert not [package for package in packages if not (COMPANIONS / package / "py.typed").exists()]


@pytest.mark.parametrize("path", CORE_MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_core_imports_no_companion(path: Path) -> None:
    """Lazy tables of names import companions only for type checkers."""
    lazy = path not in (PACKAGE / "__init__.py", PACKAGE / "algorithms" / "__init__.py")
    assert not set(filter(None, map(companion, imports(path, lazy))))


@pytest.mark.parametrize(
    "path", COMPANION_MODULES, ids=lambda path: str(path.relative_to(COMPANIONS))
)
def test_companions_import_only_what_they_declare(path: Path) -> None:
    package = path.relative_to(COMPANIONS).parts[0]
    assert {*filter(None, map(companion, imports(path)))} <= {package, *USES[package].split()}


def test_only_the_cluster_imports_ipyparallel() -> None:
    users = {
        top_module(path) for path in CORE_MODULES if any("ipyparallel" in n for n in imports(path))
    }
    assert users == {"cluster"}


def test_every_import_is_declared() -> None:
    owner = metadata.packages_distributions()
    names = {name.split(".")[0] for path in MODULES for name in imports(path)}
    third_party = names - {"distkit", *USES, "benchmarks", "__future__"} - sys.stdlib_module_names
    declared = {re.match(r"[\w-]+", r)[0].lower() for r in metadata.requires("distkit")}
    assert not {name for name in third_party if not {d.lower() for d in owner[name]} & declared}


def python(*args: str | Path, cwd: Path = ROOT) -> str:
    """Run code in a new Python, by default in the project's folder; return its output."""
    ran = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_importing_distkit_loads_no_heavy_package() -> None:
    heavy = {"torch", "ipyparallel", "numpy", "pandas", "sklearn", "matplotlib", "IPython"}
    assert not heavy & {
        *python("-Werror", "-c", "import distkit, sys; print(*sys.modules)").split()
    }


def test_recorded_traces_replay_without_torch(tmp_path: Path) -> None:
    code = """if True:
        import sys
        sys.modules["torch"] = None  # importing it raises ImportError
        from distkit import cli
        from distkit_examples.recorded import RECORDED
        for name in RECORDED:
            assert cli.main(["replay", name, "--no-browser", "--html", f"{name}.html"]) == 0
    """
    output = python("-Werror", "-c", code, cwd=tmp_path)
    names = {page.stem for page in tmp_path.glob("*.html")}
    assert names == {file.stem for file in COMPANIONS.rglob("recorded/*.trace")}
    assert len(names) == output.count("Replay: ") == 7
    assert not [name for name in names if name not in PACKAGE.joinpath("cli.py").read_text()]


# -- the public interface ----------------------------------------------------------


def test_public_names_are_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, *NOTEBOOKS])
    assert {*distkit.__all__, "__version__"} == set(dir(distkit))
    assert all(getattr(distkit, name).__doc__ for name in distkit.__all__)
    assert not [name for name in distkit.__all__ if f"dk.{name}" not in text]


def test_wheel_contains_only_distkit_and_companions(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(target / path.relative_to(folder))
        for folder, target in (
            (PACKAGE, Path("distkit")),
            (COMPANIONS, Path()),
            (ROOT / "notebooks" / "course", Path("distkit_course/content")),
        )
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"questions.md", "page.html", "py.typed", "d3.js"} <= {Path(f).name for f in files}
    assert files <= inside
    assert {name.split("/")[0] for name in inside} == {
        "distkit",
        *USES,
        f"distkit-{distkit.__version__}.dist-info",
    }


def test_release_metadata_is_consistent(wheel: Path) -> None:
    built = sorted(wheel.parent.glob("distkit-*"))
    assert [path.suffix for path in built] == [".whl", ".gz"]
    assert python("-m", "twine", "check", "--strict", *built).count("PASSED") == 2
    citation = dict(
        re.findall(r"^([\w-]+): (.+)$", ROOT.joinpath("CITATION.cff").read_text(), re.M)
    )
    assert citation["version"] == distkit.__version__
    assert citation["license"] == metadata.metadata("distkit")["License-Expression"]


# -- style ---------------------------------------------------------------------------


def function_sizes(path: Path) -> Iterator[tuple[int, str]]:
    """Return the number of statements of each function, without its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            statements = sum(isinstance(n, ast.stmt) for n in ast.walk(node)) - 1
            yield statements - bool(ast.get_docstring(node)), f"{path.name}:{node.name}"


def test_functions_are_short() -> None:
    found = sorted(chain.from_iterable(map(function_sizes, MODULES)))
    tenths = quantiles([size for size, _ in found], n=10)
    assert (tenths[4] <= 5, tenths[8] <= 12) == (True, True), f"median, 90%: {tenths}"
    assert not [(size, name) for size, name in found if size > 39]


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy"])
def test_make_check_passes(tool: str) -> None:
    assert tool in ROOT.joinpath("Makefile").read_text()
    python("-m", *tool.split())


# -- documentation and metadata --------------------------------------------------------

FORBIDDEN = re.compile(
    r"/(work|root)/\w|/home/(?!me/)\w|\b(pypi|pythonhosted|anaconda)\.(org|com)|download\.pytorch"
    r"|--(extra-)?index-url|--find-link[s]"
)


def test_no_machine_paths_and_no_registry_hosts() -> None:
    folders = [
        "distkit",
        "companions",
        "benchmarks",
        "notebooks",
        "tests",
        "docs",
        "tools",
        "binder",
        ".ci",
    ]
    files = chain(ROOT.glob("*"), *(ROOT.joinpath(folder).rglob("*") for folder in folders))
    texts = [
        p
        for p in files
        if p.is_file() and p.suffix not in {".pyc", ".png", ".gif", ".trace"} and p.name != ".git"
    ]
    assert not {str(p): m[0] for p in texts if (m := FORBIDDEN.search(p.read_text()))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"""(?:\]\(|src="|srcset="|href=")(?!https?:|#)([^)"#]+)""", text)
    assert not [link for link in links if not page.parent.joinpath(link).exists()]
    targets = set(re.findall(r"^([a-z]+):", ROOT.joinpath("Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", text)) <= targets


def test_cells_named_in_systems_md_exist() -> None:
    named = re.findall(
        r"/(\w+\.ipynb)\) `([\w-]+)`", ROOT.joinpath("docs", "systems.md").read_text()
    )
    cells = {path.name: json.loads(path.read_text())["cells"] for path in NOTEBOOKS}
    assert named and all(any(cell["id"] == id for cell in cells[name]) for name, id in named)


def test_changelog_has_this_version() -> None:
    assert f"## [{metadata.version('distkit')}]" in ROOT.joinpath("CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs(path: Path) -> None:
    """GitHub does not render notebooks with ``metadata.widgets`` but no state."""
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_do_not_wait_for_finished_runs(path: Path) -> None:
    code = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    lines = [line.strip() for cell in code for line in cell["source"]]
    loops = [line for line in lines if line.startswith("while ") and "run." in line]
    assert not [line for line in loops if "run.finished" not in line]


def test_binder_configuration_is_complete() -> None:
    """repo2docker can print its Dockerfile without Docker."""
    dockerfile = python("-m", "repo2docker", "--no-build", "--debug", ".")
    expected = (
        "environment-2epy-2d3-2e11-2dlinux",  # repo2docker's escaping of py-3.11
        '--file "binder/environment.yml"',
        "RUN ./binder/postBuild",
        "binder/start",
    )
    assert not [text for text in expected if text not in dockerfile]


def test_both_environments_list_all_requirements() -> None:
    names = {
        re.match(r"[\w-]+", requirement)[0]
        for requirement in metadata.requires("distkit")
        if "extra ==" not in requirement
    }
    conda = {"matplotlib": "matplotlib-base", "torch": "pytorch-cpu"}
    for file in ("environment.yml", "binder/environment.yml"):
        listed = set(re.findall(r"^  - ([\w-]+)", ROOT.joinpath(file).read_text(), re.MULTILINE))
        assert {conda.get(name, name) for name in names} <= listed, file


def test_constraints_pin_declared_packages() -> None:
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in metadata.requires("distkit")}
    pinned = re.findall(r"^([\w-]+)==", ROOT.joinpath("constraints.txt").read_text(), re.MULTILINE)
    assert names == set(pinned)
