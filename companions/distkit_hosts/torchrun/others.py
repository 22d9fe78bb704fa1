"""Control a run of another launcher's ranks through their sockets on this machine.

Their files contain the events before the connection; later events arrive as from a cluster's ranks.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit.cluster.runs.conductor import Conductor, RankController
from distkit.cluster.runs.outcome import Failure, Frame, Outcome
from distkit.errors import RunError
from distkit.recording.plain import encode_rows
from distkit.trace.info import RankEnd, RunInfo
from distkit_hosts.torchrun import merge, rankfile
from distkit_hosts.torchrun.line import RUN
from distkit_hosts.torchrun.rankfile import Record

#: Time limit of a rank's answer [s]; a rank that is stopped or in use does not answer.
ANSWERS = 5.0

#: The facts that are also in a rank's file.
_FACTS = "group", "raising", "threads", "unreduced"


class AttachedRun(Conductor):
    """A run whose launcher handles its end; ranks are released only on request.

    Args:
        records: the files of the ranks, by their number.
        info: the metadata of the trace.
    """

    def __init__(self, records: Mapping[int, Record], info: RunInfo) -> None:
        program = next(iter(records.values())).about["program"]
        super().__init__(program, RUN, [*records], info, wait_forever=True)
        self._files = {rank: record.path for rank, record in records.items()}
        self._afterwards = "their launcher decides what happens next"

    def read_history(self, rank: int, events: int) -> None:
        """Read the events and facts of a rank from before the connection."""
        record = rankfile.read(self._files[rank])
        for kind in _FACTS:
            for fact in record.notes.get(kind, ()):
                self.handle_event(rank, kind, fact)
        self._add(rank, record.rows[:events])

    def read_end(self, rank: int) -> None:
        """Read the end of a rank from its file, after its connection broke."""
        record = rankfile.read(self._files[rank])
        self._add(rank, record.rows[self.live.rows[rank] :])
        self.add_outcome(outcome(rank, merge.end_of(record), ended=rank in self._killed))

    def _add(self, rank: int, rows: list[Any]) -> None:
        self.handle_event(rank, "rows", (len(rows), encode_rows(rows)))

    def _release(self, controller: RankController) -> None:
        self._wait_until(lambda: self._interrupted or not self.waiting)
        if self.waiting:
            super()._release(controller)


def outcome(rank: int, end: RankEnd | None, *, ended: bool = False) -> Outcome:
    """Return the outcome of a rank.

    Args:
        rank: its number.
        end: the end according to its file; None if the file has none.
        ended: whether this process ended it.
    """
    if ended or end is None or end.how == "died":
        if ended:
            return Outcome(rank, error=Failure("Released", released=True))
        return Outcome(rank, died="killed" if end is None else end.text)
    if end.how == "returned":
        return Outcome(rank)
    kind, _, text = end.text.partition(": ")
    file, _, line = end.where.rpartition(":")
    frames: list[Frame] = [(file, int(line), "", None)] if file else []
    released = end.how == "released"
    return Outcome(rank, error=Failure(kind, text, frames, end.time or 0.0, released=released))


class AttachedRanks(RankController):
    """Controls the ranks of an :class:`AttachedRun` through their sockets.

    Raises:
        RunError: a rank does not answer.
    """

    def __init__(self, run: AttachedRun, records: Mapping[int, Record]) -> None:
        self.why = "ended by a notebook that follows the run"  # for the ranks that are released
        self._pids = {rank: record.about["pid"] for rank, record in records.items()}
        self._channels: dict[int, Channel] = {}
        for rank, record in records.items():
            self._channels[rank] = self._connect(run, rank, record.about["line"])
        for rank, channel in self._channels.items():
            channel.listen(partial(_handle_message, run, rank), partial(run.read_end, rank))

    def _connect(self, run: AttachedRun, rank: int, path: str) -> Channel:
        sock = socket.socket(socket.AF_UNIX)
        channel = Channel(sock)
        sock.settimeout(ANSWERS)
        try:
            sock.connect(path)
            while (message := channel.recv())[1] != "begun":
                run.handle_event(rank, *message[1:])
        except (OSError, EOFError) as error:
            for opened in (channel, *self._channels.values()):
                opened.close()
            raise RunError(
                f"rank {rank} does not answer. Another notebook may control it, or it is stopped "
                "or ending. Try again, or check the terminal of its launcher."
            ) from error
        sock.settimeout(None)
        run.read_history(rank, message[2])
        return channel

    def go(self, ranks: Iterable[int], count: int | None) -> None:
        """Let these ranks pass the gate ``count`` times; None opens it permanently."""
        self._send(ranks, "go", RUN, count)

    def step(self) -> None:
        """Make all ranks stop before each communication."""
        self._send(self._channels, "step", RUN)

    def release(self, ranks: Iterable[int]) -> None:
        """Release these ranks, wherever they wait."""
        self._send(ranks, "release", RUN, self.why)

    def end(self, ranks: Iterable[int]) -> None:
        """Kill these ranks' processes; an open connection shows that each still exists."""
        for rank in ranks:
            with suppress(OSError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def _send(self, ranks: Iterable[int], *message: Any) -> None:
        for rank in ranks:
            with suppress(OSError):  # it has just ended
                self._channels[rank].send(message)


def _handle_message(run: AttachedRun, rank: int, message: tuple[int, str, Any]) -> None:
    run.handle_event(rank, *message[1:])
