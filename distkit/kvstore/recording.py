"""What the parameter server's processes write into the trace. Nothing, when nobody records.

A request is one operation at the node that asks (``push`` …), a ``recv`` and a ``send`` at the one
that answers; all three share a ``match``, from which a trace draws the two arrows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distkit.events import Op, State
from distkit.kvstore.entry import Update
from distkit.kvstore.messages import (
    Answer,
    Barrier,
    Init,
    Message,
    Pull,
    Push,
    Register,
    Request,
    SetOptimizer,
)
from distkit.kvstore.placement import dtype_name
from distkit.trace import recorder

if TYPE_CHECKING:
    from torch import Tensor

#: Requests that are drawn as messages; a barrier is drawn as the workers' one collective.
_MESSAGES = {Register: Op.REGISTER, Init: Op.INIT, SetOptimizer: Op.INIT, Push: Op.PUSH,
             Pull: Op.PULL}  # fmt: skip
_OPS = {**_MESSAGES, Barrier: Op.BARRIER}


class Asking:
    """One request, from sending to its answer, as an operation of the node that asks.

    Args:
        request: what is asked.
        peer: id of the node that is asked; None if it is this process.
    """

    def __init__(self, request: Request, peer: int | None) -> None:
        self._rec = recorder.current() if type(request) in _OPS else None
        if self._rec is None:
            return
        self._op, self._seq = _OPS[type(request)], self._rec.next_seq()
        self._common: dict[str, Any] = {
            "peer": peer, "match": request.match, "label": _label(request),
            "where": recorder.user_line(), **_layout(_tensor(request)),
        }  # fmt: skip
        if isinstance(request, Barrier):
            self._common |= {"peer": None, "match": f"kv:{request.run}:barrier:{request.nth}"}
        self._note(State.SCHEDULED)
        self._note(State.STARTED, _tensor(request))

    def answered(self, answer: Answer) -> None:
        """The answer is here: with the value, if it was a pull."""
        self._note(State.COMPLETED, _tensor(answer))

    def failed(self) -> None:
        """It was refused, or nobody waits for the answer any more."""
        self._note(State.FAILED)

    def _note(self, state: State, tensor: Tensor | None = None) -> None:
        if self._rec is not None:
            fields = self._common | _values(tensor)
            self._rec.record(self._seq, self._op, state, **fields)


class Answering:
    """Requests and answers as the messages of the node that answers, and its updates."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}  # of the requests not answered yet

    def arrived(self, request: Request) -> None:
        """A request is here."""
        rec = recorder.current()
        if rec is None or type(request) not in _MESSAGES:
            return
        label = self._labels[request.match] = _label(request)
        tensor = _tensor(request)
        common = {"peer": request.node, "match": request.match, "label": label, **_layout(tensor)}
        seq = rec.next_seq()
        rec.record(seq, Op.RECV, State.SCHEDULED, **common)
        rec.record(seq, Op.RECV, State.COMPLETED, **common | _values(tensor))

    def answering(self, answer: Message) -> None:
        """An answer is about to leave."""
        label = self._labels.pop(answer.match, None)
        rec = recorder.current()
        if rec is None or label is None:
            return
        tensor = _tensor(answer)
        # of a worker whose gradients came too late for their round: so many did
        late = getattr(answer, "dropped", 0) or None
        common = {"peer": answer.node, "match": answer.match, "label": label, "tag": late,
                  **_layout(tensor)}  # fmt: skip
        seq = rec.next_seq()
        rec.record(seq, Op.SEND, State.STARTED, **common | _values(tensor))
        rec.record(seq, Op.SEND, State.COMPLETED, **common)


@contextmanager
def updating(update: Update) -> Iterator[None]:
    """An update as a marked span: weights before and after; its tag is the greatest staleness.

    Its label, ``update KEY → vVERSION ← WORKER, WORKER (N late)``, names the workers whose
    gradients it applies. *N late*: N updates came between the worker's pull and this one.
    """
    rec = recorder.current()
    if rec is None:
        yield
        return
    seq, entry = rec.next_seq(), update.entry
    gradients = (f"{worker} ({n} late)" if n else str(worker)
                 for worker, n in zip(update.workers, update.staleness, strict=True))  # fmt: skip
    label = f"update {update.key} → v{entry.version + 1} ← {', '.join(gradients)}"
    tag = max(update.staleness)
    rec.record(seq, Op.MARK, State.STARTED, label=label, tag=tag, **_values(entry.value))
    yield
    rec.record(seq, Op.MARK, State.COMPLETED, label=label, tag=tag, **_values(entry.value))


def _label(request: Request) -> str:
    match request:
        case Init() | Push() | Pull():
            return str(request.key)
        case SetOptimizer():
            return f"optimizer {request.name}"
        case Register():
            return _terms(request)
    return ""


def _terms(register: Register) -> str:
    """What decides who waits: the mode, and its bound or backup workers: "dist_sync backup=1"."""
    staleness, backup = (register.terms.get(name, -1) for name in ("staleness", "backup"))
    told = [register.mode, f"staleness={staleness:g}" * (staleness >= 0),
            f"backup={backup:g}" * (backup > 0)]  # fmt: skip
    return " ".join(filter(None, told))


def _tensor(message: Message) -> Tensor | None:
    return getattr(message, "value", None)


def _layout(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    return {"nbytes": tensor.nbytes, "shape": tuple(tensor.shape), "dtype": dtype_name(tensor)}


def _values(tensor: Tensor | None) -> dict[str, Any]:
    rec = recorder.current()
    if tensor is None or rec is None or not rec.can_look():
        return _layout(tensor)
    return {**_layout(tensor), "summary": rec.look(tensor)}
