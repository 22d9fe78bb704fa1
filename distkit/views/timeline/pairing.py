"""Which operations of a whole trace belong together: the ends of arrows, the ties of collectives.

The rules are those of :func:`distkit.trace.operations.matches`, for all operations at once.
"""

from __future__ import annotations

import numpy as np

from distkit.events import COLLECTIVES, COMPUTATION, P2P, REQUESTS, Op, State
from distkit.views.timeline.operations import Ints, Operations, nth


class Pairs:
    """Arrows and ties.

    ``tie`` has one element per operation: -1, or the number of its collective. An arrow is
    an element of ``send`` and ``recv`` (operations, -1: none), ``sent`` and ``received`` [s]
    (NaN: never), ``nbytes`` and ``about`` (the operation that names it); replies come last.
    """

    def __init__(self, ops: Operations) -> None:
        self.ops, self._names = ops, list[str]()
        self.tie = self._ties()
        ends = [self._messages(), self._requests()]
        self.send, self.recv = (np.concatenate([e[i] for e in ends]) for i in (0, 1))
        self.p2p = np.arange(len(self.send)) < len(ends[0][0])
        self._arrows()

    def _ties(self) -> Ints:
        ops = self.ops
        mine = np.flatnonzero(ops.among(COLLECTIVES))
        groups: dict[str, int] = {}
        group = ops.each([groups.setdefault(k.group, len(groups)) for k in ops.looks])[mine]
        named = ops.match[mine] >= 0
        counted = nth(np.where(named, -1 - np.arange(len(mine)), ops.rank[mine] * 2**20 + group))
        key = np.where(named, -1 - ops.match[mine], group * (len(ops) + 1) + counted)
        self.ties, numbers = np.unique(key, return_inverse=True)
        self._groups = list(groups)
        found = np.full(len(ops), -1)
        found[mine] = numbers
        return found

    def _messages(self) -> tuple[Ints, Ints]:
        """Senders and receivers of point-to-point messages: first in, first out."""
        ops = self.ops
        peer = ops.each([-1 if k.peer is None else k.peer for k in ops.looks])
        mine = np.flatnonzero(ops.among(P2P) & (ops.match < 0) & (peer >= 0))
        queues: dict[tuple[str, int | None], int] = {}
        queue = ops.each([queues.setdefault((k.group, k.tag), len(queues)) for k in ops.looks])
        sends = ops.among([Op.SEND])[mine]
        ends = np.stack([ops.rank[mine], peer[mine]])
        src, dst = np.where(sends, ends, ends[::-1])
        most = int(ends.max(initial=0)) + 1
        _, key = np.unique((queue[mine] * most + src) * most + dst, return_inverse=True)
        pair = key * (len(mine) + 1) + nth(key * 2 + sends)
        both = np.unique(pair)
        send, recv = np.full(len(both), -1), np.full(len(both), -1)
        send[np.searchsorted(both, pair[sends])] = mine[sends]
        recv[np.searchsorted(both, pair[~sends])] = mine[~sends]
        some = (
            ~ops.scheduled[send] & (send >= 0) | ~ops.scheduled[recv] & (recv >= 0)
            if len(ops)
            else np.zeros(0, bool)
        )
        self.nth = (both % (len(mine) + 1))[some]
        return send[some], recv[some]

    def _requests(self) -> tuple[Ints, Ints]:
        """Senders and receivers of requests, and of the replies that came back."""
        ops = self.ops
        numbered = (ops.match >= 0) & ~ops.among(COMPUTATION | COLLECTIVES)
        members = [
            np.flatnonzero(numbered & ops.among(some)) for some in (REQUESTS, [Op.RECV], [Op.SEND])
        ]
        ask, got, back = (np.full(len(ops.matches), -1) for _ in range(3))
        for place, found in zip((ask, got, back), members, strict=True):
            place[ops.match[found]] = found
        addressed = ops.each([k.peer is not None for k in ops.looks]).astype(bool)
        began = np.zeros(len(ops.matches), bool)
        began[ops.match[numbered & ~ops.scheduled]] = True
        asked = (ask >= 0) & began & (addressed[ask] if len(ops) else False)
        replied = asked & (back >= 0)
        return (
            np.concatenate([ask[asked], back[replied]]),
            np.concatenate([got[asked], ask[replied]]),
        )

    def _arrows(self) -> None:
        ops, send, recv = self.ops, self.send, self.recv
        if not len(send):
            self.sent = self.received = np.zeros(0)
            self.nbytes = self.about = np.zeros(0, np.int64)
            return
        request = ops.among(REQUESTS)
        self.sent = np.where((send >= 0) & ~ops.scheduled[send], ops.start[send], np.nan)
        failed = ops.each([k.state is State.FAILED for k in ops.looks]).astype(bool)
        lost = (recv < 0) | (self.p2p & failed[recv])
        self.received = np.where(lost, np.nan, ops.end[recv])
        asks = (send >= 0) & request[send]
        self.about = np.where((recv >= 0) & request[recv], recv, np.where(send >= 0, send, recv))
        heavy = np.where(asks & (recv >= 0), recv, np.where(send >= 0, send, recv))
        self.nbytes = ops.nbytes[heavy]

    def tie_name(self, tie: int) -> str:
        """The id of a collective."""
        key, most = int(self.ties[tie]), len(self.ops) + 1
        if key < 0:
            return self.ops.matches[-1 - key]
        return f"{self._groups[key // most]}#{key % most}"

    def ends_of(self, arrow: int) -> tuple[int, int]:
        """Source and destination of an arrow; a missing end is where the other one says."""
        ops, send, recv = self.ops, int(self.send[arrow]), int(self.recv[arrow])
        peer = ops.looks[ops.look[send if send >= 0 else recv]].peer
        src, dst = (int(ops.rank[i]) if i >= 0 else peer for i in (send, recv))
        assert src is not None and dst is not None
        return src, dst

    def sums(self) -> list[tuple[int, int, int, int]]:
        """Source, destination, number and bytes of what was sent from each rank to each."""
        ops, peer = (
            self.ops,
            self.ops.each([-1 if k.peer is None else k.peer for k in self.ops.looks]),
        )
        gone = ~np.isnan(self.sent)
        send, recv = self.send[gone], self.recv[gone]
        src, dst = ops.rank[send], np.where(recv >= 0, ops.rank[recv], peer[send])
        room = int(max(src.max(initial=0), dst.max(initial=0))) + 1
        both, which = np.unique(src * room + dst, return_inverse=True)
        sizes = np.bincount(which, weights=self.nbytes[gone], minlength=len(both))
        parts = (both // room, both % room, np.bincount(which, minlength=len(both)), sizes)
        return list(zip(*(part.astype(int).tolist() for part in parts), strict=True))

    def name(self, arrow: int) -> str:
        """The id of an arrow, numbered in its queue."""
        ops, about = self.ops, int(self.about[arrow])
        if not self.p2p[arrow]:
            match = ops.matches[ops.match[about]]
            return f"{match}/{int(about == self.recv[arrow])}"
        (src, dst), look = self.ends_of(arrow), ops.looks[ops.look[about]]
        return f"{look.group}:{src}>{dst}:{look.tag}#{self.nth[arrow]}/0"
