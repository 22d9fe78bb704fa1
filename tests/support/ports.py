"""A port that stays free until the program under test listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port that one process can listen on.

    The port is bound without listening, so that the system assigns it to no other process;
    ``SO_REUSEADDR`` lets a server, such as a TCPStore, bind it too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
