"""The relay of a forwarded port: takes connections from outside to a port of the host it runs on.

Runs as a script. A socket stays in the network where it was made: the listening one, inherited,
is the machine's, and the connections that the relay makes are the host's.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from functools import partial


async def main(listener: int, port: int) -> None:
    """Relay all that a listening socket accepts to a port of this host."""
    outside = socket.socket(fileno=listener)
    server = await asyncio.start_server(partial(_relay, port), sock=outside)
    await server.serve_forever()


async def _relay(port: int, reader: StreamReader, writer: StreamWriter) -> None:
    try:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
    except OSError:  # nothing listens there, or not yet
        writer.close()
        return
    await asyncio.gather(_pump(reader, ours), _pump(theirs, writer))
    writer.close()
    ours.close()


async def _pump(source: StreamReader, to: StreamWriter) -> None:
    """Pass on what comes, and that nothing comes any more."""
    with suppress(OSError):
        while data := await source.read(1 << 16):
            to.write(data)
            await to.drain()
        to.write_eof()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
