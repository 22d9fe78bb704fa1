"""Noticing that a program uses the tensors of an asynchronous call before it has waited for it.

No error tells: the program reads whatever lies there, often even the right numbers. What a call
reads may be read meanwhile, and not written; what it writes may be neither. While such calls are
open, torch's function mode shows us every call from Python with its tensors. Of those that touch
the memory of an open call, a dispatch mode shows the operators, whose schemas tell what they read,
write, or only make a view of.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from distkit.events import Op, State
from distkit.recording.pending import Pending
from distkit.recording.recorder import Recorder, user_line

#: What reads the values without an operator.
_UNSEEN = frozenset("numpy tolist __array__ __dlpack__ __repr__ __format__".split())

#: Of more calls that are open at once the oldest are no longer watched.
MOST_OPEN = 256

Tensors = Iterable[torch.Tensor]


@dataclass(slots=True, eq=False)
class _Call:
    """An asynchronous call that its program has not waited for.

    ``memory`` has the first and last byte of each buffer, and whether the call writes it;
    ``versions`` the tensors that only the program changes, with torch's count of changes.
    """

    recorder: Recorder
    seq: int
    memory: list[tuple[int, int, bool]]
    versions: list[tuple[torch.Tensor, int]]


class OpenBuffers(TorchFunctionMode):
    """The buffers of calls under way; it is in force while there are any."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, tuple[weakref.ref[Any], _Call]] = {}  # by the work's id
        self._inside = threading.local()  # a call that we look at, where the mode is off

    @property
    def active(self) -> bool:
        """True while there are any."""
        return bool(self._open)

    def add(
        self, work: Any, pending: Pending, reads: Tensors, writes: Tensors, counts: Tensors = ()
    ) -> None:
        """Watch the buffers of an asynchronous call.

        Args:
            work: what the caller waits for.
            pending: the call.
            reads: the tensors that it reads.
            writes: those that it writes.
            counts: those of them that nobody but the program changes by an operator.
        """
        with DisableTorchFunction():  # nobody hears of our looks
            memory = [(*_bytes(t), False) for t in reads] + [(*_bytes(t), True) for t in writes]
            versions = [(t, t._version) for t in counts if _is_counted(t)]
        key = id(work)
        call = _Call(pending.recorder, pending.seq, memory, versions)
        self._open[key] = weakref.ref(work, lambda _: self._open.pop(key, None)), call
        if len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open)), None)
        self.refresh()

    def remove(self, work: Any) -> None:
        """Stop watching the buffers of a call that was waited for."""
        if (found := self._open.pop(id(work), None)) is not None:
            if _is_changed(found[1]):
                _note(found[1], "", writes=True)
            self.refresh()

    def clear(self) -> None:
        """The run is over."""
        self._open.clear()
        self.refresh()

    def refresh(self) -> None:
        """Be in force in this thread if there are any; not in the middle of a call we look at."""
        if getattr(self._inside, "depth", 0):
            return
        # we stay at the bottom, above torch's default device: the user's come and go at the top
        modes: list[Any] = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
        if self in modes and not self._open:
            modes.remove(self)
        elif self not in modes and self._open:
            modes.insert(bool(modes) and isinstance(modes[0], DeviceContext), self)
        for mode in modes:
            _push_mode(mode)

    def after(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward pass: it writes gradients in C++, and its hooks have modes of their own."""
        before = self._open.copy()
        try:
            return backward(*args, **kwargs)
        finally:
            for key, mine in before.items():
                if self._open.get(key) is mine and _is_changed(mine[1]):
                    del self._open[key]
                    _note(mine[1], "backward", writes=True)
            if self._open and self._open.keys() - before.keys():
                self.refresh()

    def look(self, name: str, reads: Tensors, writes: Tensors) -> None:
        """Something reads and writes tensors: note the open calls that it disturbs."""
        found = [*((t, False) for t in reads), *((t, True) for t in writes)]
        for key, (_, call) in list(self._open.items()):
            with DisableTorchFunction():
                hits = [
                    changes
                    for first, last, written in call.memory
                    for t, changes in found
                    if (changes or written) and meets(t, first, last)
                ]
            if hits:
                self._open.pop(key, None)  # once is enough
                _note(call, name, writes=any(hits))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at the tensors of a call, and make it."""
        if torch.compiler.is_compiling():  # the compiler reads this function: it sees none of it
            return func(*args, **(kwargs or {}))
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not self._open or name == "__get__" or not self._is_near((args, kwargs.values())):
            return self._within(func, args, kwargs)
        if name in _UNSEEN:
            self.look(name, _tensors((args, kwargs.values())), ())
        if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            return self._within(func, args, kwargs)  # the tap looks at those
        with _Operators(self, name):
            return self._within(func, args, kwargs)

    def _within(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = self._inside
        inside.depth = getattr(inside, "depth", 0) + 1
        try:
            return func(*args, **kwargs)
        finally:
            inside.depth -= 1

    def _is_near(self, values: Any) -> bool:
        """True if a tensor among these may lie in an open buffer."""
        with DisableTorchFunction():
            covered = [*map(_bytes, _tensors(values))]
        if not covered:
            return False
        return any(
            begin < last and first < end
            for _, call in list(self._open.values())
            for first, last, _ in call.memory
            for begin, end in covered
        )


class _Operators(TorchDispatchMode):
    """The operators that a call is made of."""

    supports_higher_order_operators = True

    def __init__(self, buffers: OpenBuffers, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers, self._name = buffers, name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at what an operator reads and writes, and call it."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and not _makes_anew(schema.name):
            reads: list[torch.Tensor] = []
            writes: list[torch.Tensor] = []
            for i, argument in enumerate(schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                alias = argument.alias_info
                if alias is None:
                    reads += _tensors(value)
                elif alias.is_write:
                    writes += _tensors(value)
            self._buffers.look(self._name, reads, writes)
        return func(*args, **kwargs)


def _is_changed(call: _Call) -> bool:
    """True if a call's tensors were changed, perhaps where no mode sees it."""
    return any(tensor._version != version for tensor, version in call.versions)


def _note(call: _Call, name: str, writes: bool) -> None:
    recorder = call.recorder
    facts: dict[str, Any] = {"function": name} | ({"writes": True} if writes else {})
    seq, where = recorder.next_seq(), user_line()
    for state in (State.STARTED, State.COMPLETED):
        recorder.record(seq, Op.TOUCH, state, match=str(call.seq), attributes=facts, where=where)


def _makes_anew(operator: str) -> bool:
    """True for operators that take a tensor's shape and not its values, such as zeros_like."""
    name = operator.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _is_counted(tensor: torch.Tensor) -> bool:
    """True if torch's count of changes concerns this memory alone, and not views beside it."""
    whole = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_inference()
    return whole and tensor.nbytes == tensor.untyped_storage().nbytes()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, type({}.values()))):
        for each in value:
            yield from _tensors(each)


# -- memory -------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of the memory that a tensor covers."""
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # a tensor of another kind, without memory of its own
        return 0, 0
    if not begin or not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (sum((n - 1) * s for n, s in sizes) + 1) * tensor.element_size()


def meets(tensor: torch.Tensor, begin: int, end: int) -> bool:
    """True if an element of a tensor lies between two addresses.

    >>> even = torch.zeros(4, 2)[::2]
    >>> at = even.data_ptr()
    >>> meets(even, at, at + 8), meets(even, at + 8, at + 16)
    (True, False)
    """
    first, last = _bytes(tensor)
    if last <= begin or end <= first:
        return False
    size = tensor.element_size()
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    rows = sorted(((s * size, n) for s, n in strides if s and n > 1), reverse=True)
    return _meets(first, rows, size, begin, end)


def _meets(at: int, rows: list[tuple[int, int]], size: int, begin: int, end: int) -> bool:
    if not rows:
        return at < end and begin < at + size
    (stride, n), *inner = rows
    if sum(s * (m - 1) for s, m in inner) + size > stride:  # rows that overlap: as one piece
        return True
    row = min(max((begin - at) // stride, 0), n - 1)  # the last that begins before, or the first
    return any(_meets(at + i * stride, inner, size, begin, end) for i in (row, row + 1) if i < n)
