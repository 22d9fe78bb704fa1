"""Recording in the parameter server's processes. Does nothing when nobody records.

A worker that is gone through step by step waits here, too, before it asks. A request is one
operation at the node that asks (``push`` …), a ``recv`` and a ``send`` at the one that answers;
all three share a ``match``, from which a trace draws the two arrows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from distkit.events import WORLD, Op, State
from distkit.kvstore.protocol.entry import Update
from distkit.kvstore.protocol.messages import (
    Answer,
    Barrier,
    Error,
    Init,
    Key,
    Message,
    Pull,
    Push,
    Register,
    Reply,
    Request,
    SetOptimizer,
)
from distkit.kvstore.protocol.placement import dtype_name
from distkit.kvstore.protocol.terms import Terms
from distkit.recording import recorder
from distkit.recording.recorder import Facts, Recorder
from distkit.recording.tap import tap

#: Requests that are drawn as messages; a barrier is drawn as the workers' one collective.
_MESSAGES = {
    Register: Op.REGISTER,
    Init: Op.INIT,
    SetOptimizer: Op.INIT,
    Push: Op.PUSH,
    Pull: Op.PULL,
}
_OPS = {**_MESSAGES, Barrier: Op.BARRIER}


#: What a worker passes before it asks: the gate of a run that is stepped through, trouble.
gates = tap.before


class Step(NamedTuple):
    """A call of the user's on a worker with :data:`gates`: its first request passes them.

    ``facts`` names its keys if there are several; ``nbytes`` are those of all of them.
    """

    facts: Facts = ()
    nbytes: int = 0

    @classmethod
    def of(cls, keys: Sequence[Key], nbytes: int = 0) -> Step:
        """A call with these keys."""
        few = keys if len(keys) <= _NAMED else (*keys[: _NAMED - 1], "…", keys[-1])
        return cls({"keys": tuple(few)} if len(few) > 1 else (), nbytes)


#: So many keys are named.
_NAMED = 4


class Asking:
    """One request, from sending to its answer, as an operation of the node that asks.

    Args:
        request: what is asked.
        peer: id of the node that is asked; None if it is this process.
        step: what it is the first request of, if that has gates to pass.
    """

    __slots__ = ("_rec", "done", "fields", "op", "seq")

    def __init__(self, request: Request, peer: int | None, step: Step | None = None) -> None:
        op = _OPS.get(type(request))
        self._rec = rec = recorder.current() if op is not None else None
        if rec is None or op is None:
            return
        self.op, self.seq, self.done = op, rec.next_seq(), False
        tensor, match = _tensor(request), request.match
        if isinstance(request, Barrier):
            peer, match = None, f"kv:{request.run}:barrier:{request.nth}"
        facts, where = _facts(request), recorder.user_line()
        self.fields: tuple[Any, ...] = (peer, WORLD, *_layout(tensor), None, where, facts, match)
        called = time.monotonic()
        values = rec.look(tensor) if tensor is not None and rec.can_look() else None
        if step is None:
            rec.put(self.seq, op, State.SCHEDULED, called, self.fields)
        else:
            told = *self.fields[:-2], step.facts or facts, match
            rec.put(self.seq, op, State.SCHEDULED, called, told, values if rec.stepped else None)
            for pass_by in gates:
                pass_by(op, step.nbytes)
        rec.put(self.seq, op, State.STARTED, time.monotonic(), self.fields, values)

    @property
    def recorded(self) -> bool:
        """True if it is in the trace."""
        return self._rec is not None

    def answered(self, answer: Answer, clock: int | None = None) -> None:
        """The answer is here: with the value, if it was a pull; ``clock`` is what Clocks say."""
        if clock is not None and self._rec is not None:
            *fields, facts, match = self.fields
            self.fields = *fields, {**facts, "clock": clock}, match
        self._end(State.COMPLETED, _tensor(answer))

    def failed(self) -> None:
        """It was refused, or nobody waits for the answer any more."""
        self._end(State.FAILED)

    def _end(self, state: State, tensor: Tensor | None = None) -> None:
        rec = self._rec
        if rec is None:
            return
        self.done, now, fields, values = True, time.monotonic(), self.fields, None
        if tensor is not None:
            fields = *fields[:2], *_layout(tensor), *fields[5:]
            values = rec.look(tensor) if rec.can_look() else None
        rec.put(self.seq, self.op, state, now, fields, values)
        if rec.stepped:
            rec.hurry()


class Clocks:
    """This worker's gradients that servers have dropped, with backup workers.

    A trace tells it with each push, since the other events do not.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Key], tuple[int, int]] = {}

    def after(self, server: int, push: Push, answer: Answer) -> int:
        """The worker's clock after this push, as :mod:`distkit.consistency` places it."""
        clock, dropped = self._known.get((server, push.key), (0, 0))
        if (now := getattr(answer, "dropped", 0)) == dropped:
            clock = max(clock, push.version) + 1
        self._known[server, push.key] = clock, now
        return clock


def wait_begins(askings: Iterable[Asking]) -> Recorder | None:
    """This thread waits for the answers; who watches the run is told, until ``wait_ends()``."""
    rec = recorder.current()
    if rec is not None and (noted := [a for a in askings if a.recorded]):
        rec.wait_begins(*noted)
    return rec


def stepped() -> bool:
    """True if this run is gone through step by step."""
    rec = recorder.current()
    return rec is not None and rec.stepped


class Answering:
    """Requests and answers as the messages of the node that answers, and its updates."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, Any]] = {}  # facts of the requests not answered yet
        self._pushes: dict[str, Push] = {}  # by the pulls that came with them

    def arrived(self, request: Request) -> None:
        """A request is here, perhaps with a pull."""
        rec = recorder.current()
        if rec is None:
            return
        self._arrived(rec, request)
        if isinstance(request, Push) and (pull := request.then) is not None:
            self._arrived(rec, pull)
            self._pushes[pull.match] = request

    def _arrived(self, rec: Recorder, request: Request) -> None:
        if type(request) not in _MESSAGES:
            return
        facts = self._open[request.match] = _facts(request)
        common, values = _about(request, facts)
        seq = rec.next_seq()
        rec.record(seq, Op.RECV, State.SCHEDULED, **common)
        rec.record(seq, Op.RECV, State.COMPLETED, **common, **values)

    def answering(self, answer: Message) -> None:
        """An answer is about to leave: that to a pull says that its push was accepted."""
        if not self._open:
            return
        push = self._pushes.pop(answer.match, None)
        if push is not None:
            self._answering(Reply(push.run, push.node, push.number))
        self._answering(answer)

    def _answering(self, answer: Message) -> None:
        facts = self._open.pop(answer.match, None)
        rec = recorder.current()
        if rec is None or facts is None:
            return
        if isinstance(answer, Error):
            facts = {**facts, "refused": True}
        if late := getattr(answer, "dropped", 0):  # so many gradients came too late for their round
            facts = {**facts, "dropped": late}
        common, values = _about(answer, facts)
        seq = rec.next_seq()
        rec.record(seq, Op.SEND, State.STARTED, **common, **values)
        rec.record(seq, Op.SEND, State.COMPLETED, **common)


def updating(update: Update, server: int | None = None) -> AbstractContextManager[None]:
    """An update as a marked span: weights before and after.

    ``server``: whose value it is, if this process serves in another's place; the span's peer.
    It names the workers whose gradients it applies, and how ``late`` each is: so many updates
    came between the worker's pull and this one.
    """
    rec = recorder.current()
    return nullcontext() if rec is None else _updating(rec, update, server)


@contextmanager
def _updating(rec: Recorder, update: Update, server: int | None) -> Iterator[None]:
    seq, entry = rec.next_seq(), update.entry
    facts = {
        "key": update.entry.key,
        "version": update.version + 1,
        "workers": tuple(update.workers),
        "late": tuple(update.staleness),
    }
    nbytes, shape, dtype = _layout(entry.value)
    told: dict[str, Any] = {"attributes": facts, "peer": server}
    told |= {"nbytes": nbytes, "shape": shape, "dtype": dtype}
    rec.record(seq, Op.MARK, State.STARTED, **told, **_values(entry.value))
    yield
    rec.record(seq, Op.MARK, State.COMPLETED, **told, **_values(entry.value))


def _facts(request: Request) -> dict[str, Any]:
    match request:
        case Init() | Push() | Pull():
            return {"key": request.key}
        case SetOptimizer():
            return {"optimizer": request.name}
        case Register():
            return _terms(request.terms) if request.terms is not None else {}
    return {}


def _terms(terms: Terms) -> dict[str, Any]:
    """The mode, and the other options that decide who waits, where they are not the defaults."""
    told = {k: v for k, v in terms.unusual.items() if k not in ("bound", "replication")}
    return {"mode": terms.mode, **told}


def _tensor(message: Message) -> Tensor | None:
    return getattr(message, "value", None)


def _layout(tensor: Tensor | None) -> tuple[int, tuple[int, ...], str]:
    """Bytes, shape and dtype."""
    if tensor is None:
        return 0, (), ""
    return tensor.nbytes, tuple(tensor.shape), dtype_name(tensor)


def _about(message: Message, facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a message's events at both of its ends, and its values."""
    tensor = _tensor(message)
    layout = zip(("nbytes", "shape", "dtype"), _layout(tensor), strict=True)
    about = {"peer": message.node, "match": message.match, "attributes": facts, **dict(layout)}
    return about, {} if tensor is None else _values(tensor)


def _values(tensor: Tensor) -> dict[str, Any]:
    rec = recorder.current()
    return {"summary": rec.look(tensor)} if rec is not None and rec.can_look() else {}
