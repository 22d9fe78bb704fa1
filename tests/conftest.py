"""Fixtures and hooks of all tests: markers, checks for leftover processes, an isolated Jupyter."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import hypothesis
import psutil
import pytest
from waiting import is_alive

from benchmarks.lab import Lab, browse, isolated_environment, missing, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    from distkit.cluster.processes.fork_client import LocalForkClient

ROOT = Path(__file__).parents[1]

# Tests must pass on a slow machine. CI uses the same examples in every run, as Hypothesis's own
# "ci" profile does.
hypothesis.settings.register_profile(
    "distkit",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("distkit")

# background jobs of a shell ignore SIGINT, and so would their children
signal.signal(signal.SIGINT, signal.default_int_handler)


# The order of tests/cluster, by parts of names. The longest tests start first, so that all workers
# finish at about the same time. Tests that use the browser are adjacent, because they share it.
ORDER = (
    *("runs[16_", "runs[10_", "runs[07_", "runs[11_", "runs[09_", "/test_notebooks"),
    *("launching", "grading", "hub.py", "site_pages"),
    *("_lab.py", "_browser.py", "_page.py", "_notebooks.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and sort the tests, and limit their time; docstring examples are marked as pure.

    A hanging test fails with a traceback. The limit is not in pyproject.toml, because
    `pytest --distkit-notebooks` must work without pytest-timeout.
    """
    for item in items:
        folder = "stress" if "stress" in item.path.parts else item.path.parent.name
        if not item.get_closest_marker("stress"):  # long tests of other folders have this marker
            item.add_marker(folder if folder in ("ranks", "cluster", "stress") else "pure")
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
    items.sort(key=_sort_key)
    gc.freeze()  # the collector would scan the imported modules in each full collection


def _sort_key(item: pytest.Item) -> int:
    if not item.get_closest_marker("cluster"):
        return -1
    return next((n for n, part in enumerate(ORDER) if part in item.nodeid), len(ORDER))


@cache
def _gpus() -> int:
    from benchmarks import gpu  # late: it imports torch

    return gpu.gpus()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Run all tests of a file on one worker, except in ``test_notebooks.py``."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, *_ = nodeid.split("::")
            return nodeid if file.endswith("test_notebooks.py") else file

    return ByFile(config, log)


@cache
def _preload_compiler() -> None:
    """Import torch's compiler in the fork server, instead of in each rank, where it takes 2 s."""
    from distkit.cluster.processes.fork_client import server

    server().preload("torch._dynamo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Preload a module for ranks, close an unneeded browser, and check the number of GPUs."""
    if "browser" not in getattr(item, "fixturenames", ()):
        browsers.close()
    if not item.get_closest_marker("pure"):
        _preload_compiler()
    mark = item.get_closest_marker("gpu")
    needed = mark.args[0] if mark and mark.args else 1
    if mark and _gpus() < needed:
        required = not _gpus() and os.environ.get("DISTKIT_GPU") == "required"
        (pytest.fail if required else pytest.skip)(f"GPUs needed: {needed}, available: {_gpus()}")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files. Paths in pytest's tmp_path are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalForkClient]:
    """A fork server for a single test, which may kill it."""
    from distkit.cluster.processes import fork_client

    with monkeypatch.context() as patch:
        patch.setattr(fork_client, "_server", None)
        yield fork_client.server()
        assert fork_client._server is not None
        fork_client._server.close()


# -- leftover processes --------------------------------------------------------
# Every process that a test starts inherits MARK. `make test` sets it before Python starts, so that
# even orphaned forks of this process are recognized.

MARK = "DISTKIT_TEST_ID"
SESSION = os.environ.setdefault(MARK, uuid.uuid4().hex)
if WORKER := os.environ.get("PYTEST_XDIST_WORKER", ""):  # ignore the processes of other workers
    SESSION = os.environ[MARK] = f"{SESSION}-{WORKER}"
mark_numbers = itertools.count()


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK, "").startswith(mark)
    except (psutil.Error, OSError):  # the process has exited, or belongs to another user
        return False


def _marked_processes(mark: str) -> list[psutil.Process]:
    me = psutil.Process()
    below = set(me.children(recursive=True)) if mark == SESSION else set()
    marked = {p for p in psutil.process_iter() if _has_mark(p, mark)}
    return [p for p in (below | marked) - {me} if is_alive(p)]


def left_running(mark: str, timeout: float = 5.0) -> list[str]:
    """Return the processes with this mark that are still running after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while (remaining := _marked_processes(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(remaining, timeout=0.1)
    return [f"{p.pid}: {' '.join(p.cmdline())}" for p in remaining if is_alive(p)]


@pytest.fixture(scope="session", autouse=True)
def no_leftover_processes() -> Iterator[None]:
    yield
    browsers.close()
    fork_client = sys.modules.get("distkit.cluster.processes.fork_client")
    if fork_client and fork_client._server:
        fork_client._server.close()  # it would run until this process exits
    remaining = left_running(SESSION)
    assert not remaining, "still running at the end of the tests:\n" + "\n".join(remaining)


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A function that returns the processes of this test that are still running after 5 s."""
    mark = f"{SESSION}-{next(mark_numbers)}"
    monkeypatch.setenv(MARK, mark)
    return lambda: left_running(mark)


# -- the release -----------------------------------------------------------------


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as built by `make dist`; the sdist is in the same folder."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


# -- an isolated Jupyter ---------------------------------------------------------


@pytest.fixture(scope="session")
def jupyter_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty configuration, isolated from the user's."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in isolated_environment(home).items():
            patch.setenv(name, folder)
        yield home


@pytest.fixture(scope="session")
def lab(jupyter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebooks."""
    root = shutil.copytree(ROOT / "notebooks", tmp_path_factory.mktemp("lab") / "notebooks")
    with serve(root, jupyter_home, dict(os.environ)) as running:
        yield running


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the notebooks that the workers execute; the site's tests read them."""
    folder = tmp_path_factory.getbasetemp() / ("../executed" if WORKER else "executed")
    folder.mkdir(exist_ok=True)
    return folder


browsers = ExitStack()  # closes the open browser


@cache
def open_browser() -> Browser:
    browsers.callback(open_browser.cache_clear)
    return browsers.enter_context(browse())


@pytest.fixture
def browser() -> Browser:
    """Debian's headless Chromium, which consecutive tests share.

    It occupies the thread's event loop, so it is closed before a test that does not use it.
    """
    if reason := missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return open_browser()


# anywidget's warning about scripts that load late on a busy machine; the widgets still work
LATE_SCRIPT = "[anywidget] Failed to initialize model."


@dataclass
class Tab:
    """A browser page that records errors and requests."""

    page: Page
    errors: list[str] = field(default_factory=list)  # on the console, or uncaught
    external_requests: list[str] = field(default_factory=list)  # none of them succeeds

    def __post_init__(self) -> None:
        self.page.on(
            "pageerror", lambda e: LATE_SCRIPT not in str(e) and self.errors.append(str(e))
        )
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on(
            "request",
            lambda r: (
                urlsplit(r.url).hostname in ("127.0.0.1", None)
                or self.external_requests.append(r.url)
            ),
        )


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new browser page, 1280 x 1600."""
    page = browser.new_page(viewport={"width": 1280, "height": 1600})
    page.set_default_timeout(120_000)  # long, for busy machines
    yield Tab(page)
    page.close()
