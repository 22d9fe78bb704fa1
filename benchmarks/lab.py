"""A real JupyterLab and browser, for benchmarks and browser tests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from distkit.errors import DistkitError

#: Environment variables of JupyterLab's folders, and the folders' names in an isolated home.
_FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "IPYTHONDIR": "ipython",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
}

#: Settings that disable the JupyterLab extensions of packages that only the tests install.
_TEST_EXTENSIONS = {
    "config/jupyter_server_config.json": {
        "ServerApp": {
            "jpserver_extensions": {
                "notebook": False,
                **{
                    f"nbgrader.server_extensions.{name}": False
                    for name in (
                        "formgrader",
                        "validate_assignment",
                        "assignment_list",
                        "course_list",
                    )
                },
            }
        }
    },
    "config/labconfig/page_config.json": {
        "disabledExtensions": {"@jupyter/nbgrader": True, "@jupyter-notebook/lab-extension": True}
    },
}

#: In the page, return whether the active notebook is open and its kernel is idle.
IDLE = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.context?.isReady && panel.sessionContext?.session?.kernel?.status === 'idle';
}"""


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab that serves the folder ``root``."""

    url: str
    token: str
    root: Path

    def address(self, notebook: str) -> str:
        """Return the URL that opens a single notebook."""
        return f"{self.url}/lab/tree/{notebook}?reset&token={self.token}"

    def ready(self) -> bool:
        """Return whether the server responds."""
        try:
            with urlopen(f"{self.url}/api/status?token={self.token}", timeout=5):
                return True
        except (OSError, HTTPException):  # still starting, or too busy to respond
            return False


def isolated_environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a JupyterLab that ignores the user's settings."""
    # answer the prompt about news, which would cover the notebook
    news = "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    preferences = {"fetchNews": "false", "checkForUpdates": False}
    for name, settings in {news: preferences, **_TEST_EXTENSIONS}.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    return {name: str(home / folder) for name, folder in _FOLDERS.items()}


@contextmanager
def serve(
    root: Path, home: Path, environ: dict[str, str], prefix: Sequence[str] = ()
) -> Iterator[Lab]:
    """Run JupyterLab on a free port on the loopback interface.

    Args:
        root: the folder with the notebooks.
        home: a folder for the log.
        environ: the server's entire environment, including :func:`isolated_environment`.
        prefix: a command that executes its arguments.

    Raises:
        DistkitError: JupyterLab exited three times or did not respond within two minutes; the
            message contains its log.
    """
    log = home / "lab.log"
    running, server = _start(root, log, environ, prefix)
    try:
        end, retries = time.monotonic() + 120, 2
        while not running.ready():
            if server.poll() is not None and retries:  # another process may be using its port
                retries -= 1
                running, server = _start(root, log, environ, prefix)
            elif server.poll() is not None or time.monotonic() > end:
                raise DistkitError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield running
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:  # the machine may be short of memory
            server.kill()
            server.wait()


def _start(
    root: Path, log: Path, environ: dict[str, str], prefix: Sequence[str]
) -> tuple[Lab, subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", uuid.uuid4().hex, root)
    with log.open("wb") as out:
        command = [*prefix, *_command(lab, port)]
        return lab, subprocess.Popen(command, stdout=out, stderr=out, env=environ)


def _command(lab: Lab, port: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--ServerApp.root_dir={lab.root}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={lab.token}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    ]


@cache
def missing() -> str:
    """Explain why no browser is available; "" if one is."""
    driver = [sys.executable, "-m", "playwright", "--version"]
    if shutil.which("chromium") and not subprocess.run(driver, capture_output=True).returncode:
        return ""
    return (
        "no browser available. On Debian: apt-get install chromium libatomic1, "
        "and pip install playwright"
    )


@contextmanager
def browse() -> Iterator[Any]:
    """Run Debian's chromium headless with Playwright. It can connect only to 127.0.0.1."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            # requests to other hosts fail; Playwright's routes would also slow down local requests
            args=["--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
        )
        try:
            yield browser
        finally:
            browser.close()


def command(page: Any, name: str, **args: str) -> Any:
    """Execute a JupyterLab command, as its menus do."""
    return page.evaluate("([name, args]) => jupyterapp.commands.execute(name, args)", [name, args])


def run_cell(page: Any, index: int) -> None:
    """Run a cell of the active notebook and wait until it has finished."""
    page.evaluate("i => { jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", index)
    command(page, "notebook:run-cell")
    page.wait_for_function(IDLE, timeout=120_000)


@contextmanager
def open_notebook(
    *cells: str, height: int = 900, files: Callable[[Path], object] = lambda root: None
) -> Iterator[tuple[Any, Path]]:
    """Open a notebook with these cells in a new JupyterLab.

    Args:
        cells: the sources of the cells.
        height: height of the page, whose width is 1280 [px].
        files: writes other files into the notebook's folder.

    Yields:
        The page and the folder.
    """
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        root = Path(folder, "notebooks")
        root.mkdir()
        files(root)
        (root / "bench.ipynb").write_text(notebook(*cells))
        environ = {**os.environ, **isolated_environment(Path(folder))}
        with serve(root, Path(folder), environ) as server, browse() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": height})
            page.goto(server.address("bench.ipynb"))
            page.wait_for_function(IDLE, timeout=60_000)
            yield page, root


def notebook(*cells: str) -> str:
    """Return the text of a notebook file with these cells."""
    entries: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "id": f"cell-{i}",
            "source": text,
        }
        for i, text in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": entries, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
