"""What all tests share: markers by folder, nobody left running, a Jupyter of their own."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder; the examples in docstrings count as pure."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(folder if folder in ("ranks", "cluster") else "pure")


# -- nobody is left running ----------------------------------------------------
# Every process that the tests start inherits MARK. `make test` sets it before Python starts,
# so that even forks of this process that lost their parent are recognised.

MARK = "DISTKIT_TEST_ID"
SESSION = os.environ.setdefault(MARK, uuid.uuid4().hex)
numbers = itertools.count()


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK, "").startswith(mark)
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _started(mark: str) -> list[psutil.Process]:
    me = psutil.Process()
    below = set(me.children(recursive=True)) if mark == SESSION else set()
    marked = {p for p in psutil.process_iter() if _carries(p, mark)}
    return [p for p in (below | marked) - {me} if _alive(p)]


def left_running(mark: str, within: float = 5.0) -> list[str]:
    """The processes with this mark that are still there after ``within`` seconds."""
    deadline = time.monotonic() + within
    while (left := _started(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
    return [f"{p.pid}: {' '.join(p.cmdline())}" for p in left if _alive(p)]


@pytest.fixture(scope="session", autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    forkserver = sys.modules.get("distkit.cluster.forkserver")
    if forkserver and forkserver._server:
        forkserver._server.close()  # kept warm until this process ends; atexit would do this
    left = left_running(SESSION)
    assert not left, "still running at the end of the tests:\n" + "\n".join(left)


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Call it at the end of a test: what this test started and did not end within 5 s."""
    mark = f"{SESSION}-{next(numbers)}"
    monkeypatch.setenv(MARK, mark)
    return lambda: left_running(mark)


# -- a Jupyter of their own ------------------------------------------------------


@pytest.fixture(scope="session")
def jupyter_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty configuration: nothing of the user's is read or written."""
    home = tmp_path_factory.mktemp("jupyter")
    folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython",
               "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings",
               "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in folders.items():
            patch.setenv(name, str(home / folder))
        yield home


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab; ``root`` holds its copy of the notebooks."""

    url: str
    token: str
    root: Path

    def ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/api/status?token={self.token}", timeout=5):
                return True
        except URLError:
            return False


@pytest.fixture(scope="session")
def lab(jupyter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A real JupyterLab on a free port of the loopback interface."""
    root = shutil.copytree(ROOT / "notebooks", tmp_path_factory.mktemp("lab") / "notebooks")
    _settle(jupyter_home / "settings")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    running = Lab(f"http://127.0.0.1:{port}", uuid.uuid4().hex, root)
    log = jupyter_home / "lab.log"
    with log.open("wb") as out:
        server = subprocess.Popen(_lab_command(running, port), stdout=out, stderr=out)
    try:
        _wait_for(running, server, log)
        yield running
    finally:
        server.terminate()
        server.wait(20)


def _lab_command(lab: Lab, port: int) -> list[str]:
    return [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        f"--ServerApp.root_dir={lab.root}", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={lab.token}", "--LabApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    ]  # fmt: skip


def _settle(folder: Path) -> None:
    """Answer the question about news in advance: it would lie over the notebook."""
    file = folder / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))


def _wait_for(lab: Lab, server: subprocess.Popen[bytes], log: Path, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while not lab.ready():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium, without a window. Module scope: it holds the thread's event loop."""
    executable = shutil.which("chromium")
    driver = [sys.executable, "-m", "playwright", "--version"]
    if executable is None or subprocess.run(driver, capture_output=True).returncode:
        reason = "no browser to test with. On Debian: apt-get install chromium libatomic1"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A browser page that notes what a quiet, offline page would not do."""

    page: Page
    errors: list[str] = field(default_factory=list)  # on the console, or uncaught
    outside: list[str] = field(default_factory=list)  # addresses beyond this machine, refused

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.route(lambda url: urlsplit(url).hostname not in ("127.0.0.1", None), self._refuse)

    def _refuse(self, route: Route) -> None:
        self.outside.append(route.request.url)
        route.abort()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A fresh browser page, 1280 x 1600."""
    page = browser.new_page(viewport={"width": 1280, "height": 1600})
    yield Tab(page)
    page.close()
