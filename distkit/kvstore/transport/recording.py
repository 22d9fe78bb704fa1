"""Records requests to the parameter server if the run is recorded.

In a stepped run, this module also pauses a worker before the first request of each call. A request
is recorded as one operation on the node that sends it (``push`` …), and as a ``recv`` and a
``send`` on the node that responds. All three share a ``match``, from which views draw two arrows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from distkit.events import WORLD, Op, State
from distkit.kvstore.protocol.messages import (
    Barrier,
    Error,
    Init,
    Key,
    Message,
    Pull,
    Push,
    Register,
    Request,
    Response,
    SetOptimizer,
)
from distkit.kvstore.protocol.placement import dtype_name
from distkit.kvstore.protocol.server import Entry
from distkit.recording import recorder
from distkit.recording.recorder import RawAttributes, Recorder
from distkit.recording.tap import tap

#: Requests drawn as messages; a barrier is drawn as one collective of the workers.
_MESSAGES = {
    Register: Op.REGISTER,
    Init: Op.INIT,
    SetOptimizer: Op.INIT,
    Push: Op.PUSH,
    Pull: Op.PULL,
}
_OPS = {**_MESSAGES, Barrier: Op.BARRIER}

#: Callbacks that run before the first request of a call, such as an injected fault.
gates = tap.before

#: Maximum number of keys in a step's attributes.
_MAX_NAMED = 4


class Step(NamedTuple):
    """A user's call, whose first request must pass the :data:`gates`.

    ``attributes`` contains the call's keys if there are several; ``nbytes`` is the total size of
    their arrays [bytes].
    """

    attributes: RawAttributes = ()
    nbytes: int = 0

    @classmethod
    def for_call(cls, keys: Sequence[Key], nbytes: int = 0) -> Step:
        """Return a step for a call with these keys."""
        names = keys if len(keys) <= _MAX_NAMED else (*keys[: _MAX_NAMED - 1], "…", keys[-1])
        return cls({"keys": tuple(names)} if len(names) > 1 else (), nbytes)


class InFlight:
    """A request in flight, recorded as an operation on the node that sends it.

    Args:
        request: the request.
        receiver: id of the node that receives it.
        step: the user's call that starts with this request, if it must pass gates.
    """

    __slots__ = ("_rec", "fields", "is_done", "op", "receiver", "request", "response", "seq")

    def __init__(self, request: Request, receiver: int, step: Step | None = None) -> None:
        self.request, self.receiver = request, receiver
        self.response: Response | None = None
        op = _OPS.get(type(request))
        self._rec = rec = recorder.current() if op is not None else None
        if rec is None or op is None:
            return
        self.op, self.seq, self.is_done = op, rec.next_seq(), False
        attributes, tensor = _attributes(request), _tensor(request)
        peer = None if isinstance(request, Barrier) else receiver
        match = f"kv:barrier:{request.nth}" if isinstance(request, Barrier) else request.match
        line, call_time = recorder.user_line(), time.monotonic()
        values, call = _values(rec, tensor), Step() if step is None else step
        self.fields = _fields(peer, tensor, attributes, match, line)
        call_fields = _fields(peer, tensor, call.attributes or attributes, match, line)
        call_values = values if step is not None and rec.stepped else None
        rec.put(self.seq, op, State.SCHEDULED, call_time, call_fields, call_values)
        for gate in gates if step is not None else ():
            gate(op, call.nbytes)
        rec.put(self.seq, op, State.STARTED, time.monotonic(), self.fields, values)

    def end(self, response: Response | None = None) -> None:
        """Record the response, with the value of a pull, or that the request was abandoned."""
        self.response, rec = response, self._rec
        if rec is None:
            return
        is_failed = response is None or isinstance(response, Error)
        state, tensor = State.FAILED if is_failed else State.COMPLETED, _tensor(response)
        self.is_done, fields = True, self.fields
        if tensor is not None:
            fields = _fields(fields[0], tensor, fields[-2], fields[-1], fields[-3])
        rec.put(self.seq, self.op, state, time.monotonic(), fields, _values(rec, tensor))
        if rec.stepped:
            rec.request_flush()


def begin_wait(in_flight: Iterable[InFlight]) -> Recorder | None:
    """Record that this thread is waiting for the responses, until ``end_wait()`` is called."""
    rec = recorder.current()
    if rec is not None and (operations := [f for f in in_flight if f._rec is not None]):
        rec.begin_wait(*operations)
    return rec


def is_stepped() -> bool:
    """Return whether the run is stepped."""
    rec = recorder.current()
    return rec is not None and rec.stepped


class ReplyRecorder:
    """Records requests and responses as messages on the node that responds."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, Any]] = {}  # attributes of unanswered requests

    def record_request(self, request: Request) -> None:
        """Record the arrival of a request."""
        rec = recorder.current()
        if rec is not None and type(request) in _MESSAGES:
            attributes = self._open[request.match] = _attributes(request)
            _record_message(rec, Op.RECV, State.SCHEDULED, request, attributes, last=True)

    def record_response(self, response: Message) -> None:
        """Record a response before it is sent."""
        attributes, rec = self._open.pop(response.match, None), recorder.current()
        if rec is None or attributes is None:
            return
        if isinstance(response, Error):
            attributes = {**attributes, "refused": True}
        if late := getattr(response, "dropped", 0):  # gradients too late for their round
            attributes = {**attributes, "dropped": late}
        _record_message(rec, Op.SEND, State.STARTED, response, attributes, last=False)


def _record_message(
    rec: Recorder, op: Op, first: State, message: Message, attributes: RawAttributes, *, last: bool
) -> None:
    """Record both events of a message; the last one has the values if ``last``, else the first."""
    seq, tensor = rec.next_seq(), _tensor(message)
    fields, values = _fields(message.node, tensor, attributes, message.match), _values(rec, tensor)
    rec.put(seq, op, first, time.monotonic(), fields, None if last else values)
    rec.put(seq, op, State.COMPLETED, time.monotonic(), fields, values if last else None)


@contextmanager
def record_update(
    entry: Entry, pushes: Sequence[Push], server: int | None = None
) -> Iterator[None]:
    """Record an update as a marked span, with the weights before and after.

    The span's attributes include the ``workers`` whose gradients are applied, and the staleness of
    each gradient (``stale_by``): the number of updates between the worker's pull and this update.

    Args:
        entry: the key that is updated.
        pushes: the gradients.
        server: the server that this process has taken over from, if any; it is the span's peer.
    """
    rec = recorder.current()
    if rec is None:
        yield
        return
    seq = rec.next_seq()
    attributes = {
        "key": entry.key,
        "version": entry.version + 1,
        "workers": tuple(p.node for p in pushes),
        "stale_by": tuple(entry.version - p.version for p in pushes),
    }
    fields = _fields(server, entry.value, attributes, None)
    values = _values(rec, entry.value)
    rec.put(seq, Op.MARK, State.STARTED, time.monotonic(), fields, values)
    yield
    values = _values(rec, entry.value)
    rec.put(seq, Op.MARK, State.COMPLETED, time.monotonic(), fields, values)


def _attributes(request: Request) -> dict[str, Any]:
    """Return the attributes of a request; for a registration, the options that affect waiting."""
    if isinstance(request, SetOptimizer):
        return {"optimizer": request.name}
    if isinstance(request, Register) and request.options is not None:
        options = request.options.non_default.items()
        attributes = {k: v for k, v in options if k not in ("bound", "replication")}
        return {"mode": request.options.mode, **attributes}
    return {"key": request.key} if isinstance(request, (Init, Push, Pull)) else {}


def _tensor(message: Message | None) -> Tensor | None:
    return getattr(message, "value", None)


def _values(rec: Recorder, tensor: Tensor | None) -> Any:
    return rec.summarize(tensor) if tensor is not None and rec.may_summarize() else None


def _fields(
    peer: int | None,
    tensor: Tensor | None,
    attributes: RawAttributes,
    match: str | None,
    line: str = "",
) -> tuple[Any, ...]:
    """Return an event's fields; see :meth:`.Recorder.put`."""
    layout: tuple[int, tuple[int, ...], str] = 0, (), ""
    if tensor is not None:
        layout = tensor.nbytes, tuple(tensor.shape), dtype_name(tensor)
    return peer, WORLD, *layout, None, line, attributes, match
