"""A kernel on a Jupyter server, accessed over HTTP and a websocket, as from a browser."""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from distkit.errors import DistkitError

#: Time limit of a cell or a request [s].
TIMEOUT = 240

#: Number of attempts to send a cell; a kernel dies and restarts if its ports are taken.
ATTEMPTS = 3

#: Maximum size of a message [bytes]; views of long runs are large.
_MAX_MESSAGE_SIZE = 1 << 30


class _DiedBeforeCell(DistkitError):
    """The kernel died before it received the cell."""


def request(url: str, token: str, method: str = "GET", body: Any = None) -> Any:
    """Send a request to a server and return its reply."""
    data = None if body is None else json.dumps(body).encode()
    http_request = Request(url, data, {"Authorization": f"token {token}"}, method=method)
    with urlopen(http_request, timeout=TIMEOUT) as reply:
        text = reply.read()
    return json.loads(text) if text else None


@dataclass(frozen=True)
class Kernel:
    """A kernel on the server at ``url``."""

    url: str
    token: str
    name: str

    @classmethod
    def start(cls, url: str, token: str, path: str = "") -> Kernel:
        """Start a kernel in the folder of the notebook at ``path``."""
        content = request(f"{url}/api/kernels", token, "POST", {"path": path})
        return cls(url, token, content["id"])

    def end(self) -> None:
        """Shut the kernel down."""
        request(f"{self.url}/api/kernels/{self.name}", self.token, "DELETE")

    def run(self, code: str) -> str:
        """Execute a cell and return its output.

        Raises:
            DistkitError: the cell raised, or its kernel exited.
        """
        for _ in range(ATTEMPTS):
            with suppress(_DiedBeforeCell), ThreadPoolExecutor(1) as thread:
                # in another thread, because Playwright may have an event loop in this one
                return thread.submit(asyncio.run, self._run(code)).result(TIMEOUT)
        raise DistkitError(f"the kernel died {ATTEMPTS} times before it received the cell")

    async def _run(self, code: str) -> str:
        url = f"{self.url}/api/kernels/{self.name}/channels".replace("http", "ws", 1)
        http_request = HTTPRequest(url, headers={"Authorization": f"token {self.token}"})
        connection = await websocket_connect(http_request, max_message_size=_MAX_MESSAGE_SIZE)
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        header |= {"username": "", "session": uuid.uuid4().hex, "date": ""}
        content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": True}
        parts = {"parent_header": {}, "metadata": {}, "buffers": [], "channel": "shell"}
        await connection.write_message(json.dumps({"header": header, "content": content, **parts}))
        try:
            return await _read_output(connection, header["msg_id"])
        finally:
            connection.close()
            while await connection.read_message() is not None:
                pass


async def _read_output(connection: WebSocketClientConnection, cell_id: str) -> str:
    output, error, started = "", "", False
    while text := await connection.read_message():
        if isinstance(text, bytes):  # a message with buffers: a view's picture
            continue
        message = json.loads(text)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] in ("restarting", "dead"):
            raise (DistkitError if started else _DiedBeforeCell)("the kernel has died")
        if message["parent_header"].get("msg_id") != cell_id:
            continue
        started = True
        output += content["text"] if kind == "stream" and content["name"] == "stdout" else ""
        error = f"{content['ename']}: {content['evalue']}" if kind == "error" else error
        if kind == "status" and content["execution_state"] == "idle":
            if error:
                raise DistkitError(error)
            return output
    raise DistkitError("the server has exited")
