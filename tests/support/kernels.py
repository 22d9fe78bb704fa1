"""A kernel of a Jupyter server, used like a browser does: by HTTP and a websocket."""

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
PATIENCE = 240

#: Number of times a cell is sent: a kernel whose ports were taken restarts with other ports.
TRIALS = 3

#: Maximum size of a message; views of long runs are large [bytes].
_LARGEST = 1 << 30


class _Unheard(DistkitError):
    """The kernel died before it received the cell."""


def ask(url: str, token: str, method: str = "GET", body: Any = None) -> Any:
    """Send a request to a server and return its reply."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Authorization": f"token {token}"}, method=method)
    with urlopen(request, timeout=PATIENCE) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@dataclass(frozen=True)
class Kernel:
    """A kernel of the server at ``url``."""

    url: str
    token: str
    name: str

    @classmethod
    def start(cls, url: str, token: str, path: str = "") -> Kernel:
        """Start a kernel for a notebook."""
        content = ask(f"{url}/api/kernels", token, "POST", {"path": path})
        return cls(url, token, content["id"])

    def end(self) -> None:
        """Shut the kernel down."""
        ask(f"{self.url}/api/kernels/{self.name}", self.token, "DELETE")

    def run(self, code: str) -> str:
        """Execute a cell and return its output.

        Raises:
            DistkitError: the cell raised, or its kernel ended.
        """
        for _ in range(TRIALS):
            with suppress(_Unheard), ThreadPoolExecutor(1) as thread:
                # Playwright may have an event loop in this thread
                return thread.submit(asyncio.run, self._run(code)).result(PATIENCE)
        raise DistkitError(f"the kernel has died {TRIALS} times before it began")

    async def _run(self, code: str) -> str:
        url = f"{self.url}/api/kernels/{self.name}/channels".replace("http", "ws", 1)
        request = HTTPRequest(url, headers={"Authorization": f"token {self.token}"})
        line = await websocket_connect(request, max_message_size=_LARGEST)
        wanted = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        wanted |= {"username": "", "session": uuid.uuid4().hex, "date": ""}
        content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": True}
        parts = {"parent_header": {}, "metadata": {}, "buffers": [], "channel": "shell"}
        await line.write_message(json.dumps({"header": wanted, "content": content, **parts}))
        try:
            return await _said(line, wanted["msg_id"])
        finally:
            line.close()
            while await line.read_message() is not None:
                pass


async def _said(line: WebSocketClientConnection, request: str) -> str:
    said, error, begun = "", "", False
    while text := await line.read_message():
        if isinstance(text, bytes):  # a message with buffers: a view's picture
            continue
        message = json.loads(text)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] in ("restarting", "dead"):
            raise (DistkitError if begun else _Unheard)("the kernel has died")
        if message["parent_header"].get("msg_id") != request:
            continue
        begun = True
        said += content["text"] if kind == "stream" and content["name"] == "stdout" else ""
        error = f"{content['ename']}: {content['evalue']}" if kind == "error" else error
        if kind == "status" and content["execution_state"] == "idle":
            if error:
                raise DistkitError(error)
            return said
    raise DistkitError("the server has ended")
