"""The ranks as ipyparallel's engines: who has registered, and how a call reaches them.

The only place that talks to ipyparallel's client.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: How long the ranks may take to register [s]: generous, for laptops under load.
PATIENCE = 120.0


class Engines:
    """ipyparallel's client of one cluster.

    Args:
        connection: what the controller says about itself.
        folder: the cluster's own.
    """

    def __init__(self, connection: dict[str, Any], folder: str) -> None:
        import ipyparallel

        self._connection, self._folder = connection["engine"], folder
        self._idents: dict[int, str] = {}
        self._forgotten: set[str] = set()
        self._client: Any = ipyparallel.Client(
            connection["client"], profile_dir=folder, ipython_dir=folder, timeout=PATIENCE
        )

    def seen_from(self, folder: str) -> dict[str, Any]:
        """What the controller says to engines, which find its sockets in this folder."""
        text = json.dumps(self._connection).replace(self._folder, folder)
        return dict(json.loads(text))

    def name(self, rank: int) -> str:
        """A name for the process that is about to be this rank."""
        self._idents[rank] = f"rank-{rank}-{secrets.token_hex(4)}"
        return self._idents[rank]

    def find(self, rank: int) -> int | None:
        """ipyparallel's id of a rank's engine, None when it has not registered."""
        ident = self._idents[rank]
        return next((i for i, u in list(self._client._engines.items()) if u == ident), None)

    def apply(
        self,
        rank: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        reply: Callable[[Any], None],
    ) -> None:
        """Have a rank call a function; ``reply`` is called with the future that is done."""
        # through the stream: a bare socket's send can swallow the news of a reply
        future = self._client.send_apply_request(
            self._client._mux_stream,
            function,
            args,
            ident=self._client._engines[self.find(rank)].encode(),
        )
        future.add_done_callback(reply)

    def forget(self, rank: int) -> None:
        """Tell the hub that an engine is gone, as ipyparallel's nanny would."""
        engine, client, ident = self.find(rank), self._client, self._idents[rank]
        if engine is not None and ident not in self._forgotten:
            self._forgotten.add(ident)

            def send() -> None:
                client.session.send(
                    client._query_stream, "unregistration_request", content={"id": engine}
                )

            client._io_loop.add_callback(send)

    def close(self) -> None:
        """Hang up."""
        with suppress(Exception):
            self._client.close()
