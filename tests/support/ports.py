"""A port that stays free until the program under test listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody, but on which one process may listen.

    A port that was only looked up may be given to another process before it is used. This one is
    bound without listening: ``SO_REUSEADDR`` lets a server, such as a TCPStore, bind it, too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
