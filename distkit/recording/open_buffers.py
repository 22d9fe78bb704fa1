"""Detects uses of a tensor while an asynchronous operation is still using it.

Until the program has waited for an operation, it must not change the operation's inputs, nor read
or change its outputs. Torch raises no error: the program reads whatever the memory contains,
which is often correct. While an operation is open, a function mode intercepts every call from
Python. If a call uses memory of an open operation, a dispatch mode intercepts the call's operators,
whose schemas show which arguments they read, write or only view.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from distkit.events import Op, State
from distkit.recording.operators import tensors_in
from distkit.recording.pending import Pending
from distkit.recording.recorder import Recorder, user_line

#: Names of functions that read values without calling an operator.
_READ_WITHOUT_OPERATOR = frozenset("numpy tolist __array__ __dlpack__ __repr__ __format__".split())

#: Maximum number of open operations to watch; beyond it, the oldest is dropped.
MAX_OPEN = 256

Tensors = Iterable[torch.Tensor]


@dataclass(slots=True, eq=False)
class _Call:
    """An asynchronous call that the program has not waited for.

    ``memory`` contains a view of each buffer, and whether the call writes it; ``versions``
    contains the tensors that only the program changes, with the values of their version
    counters.
    """

    recorder: Recorder
    seq: int
    memory: list[tuple[NDArray[Any], bool]]
    versions: list[tuple[torch.Tensor, int]]


class OpenBuffers(TorchFunctionMode):
    """A function mode that watches the buffers of open operations, active while any is open."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, tuple[weakref.ref[Any], _Call]] = {}  # by the Work's id
        # the depth of intercepted calls in each thread; the mode is disabled inside them
        self._thread = threading.local()

    @property
    def active(self) -> bool:
        """Whether any operation is open."""
        return bool(self._open)

    def add(
        self, work: Any, pending: Pending, reads: Tensors, writes: Tensors, versioned: Tensors = ()
    ) -> None:
        """Watch the buffers of an asynchronous call.

        Args:
            work: the ``Work`` that the caller waits for.
            pending: the call.
            reads: the tensors that the call reads.
            writes: the tensors that the call writes.
            versioned: the tensors whose version only the program increments.
        """
        with DisableTorchFunction():  # hidden from other modes
            memory = [(memory_view(t), False) for t in reads] + [
                (memory_view(t), True) for t in writes
            ]
            versions = [(t, t._version) for t in versioned if _has_own_version(t)]
        key = id(work)
        call = _Call(pending.recorder, pending.seq, memory, versions)
        self._open[key] = weakref.ref(work, lambda _: self._open.pop(key, None)), call
        if len(self._open) > MAX_OPEN:
            self._open.pop(next(iter(self._open)), None)
        self.refresh()

    def remove(self, work: Any) -> None:
        """Stop watching the buffers of a call that the program has waited for."""
        if (entry := self._open.pop(id(work), None)) is not None:
            if _is_changed(entry[1]):
                _record_use(entry[1], "", writes=True)
            self.refresh()

    def clear(self) -> None:
        """Stop watching all buffers."""
        self._open.clear()
        self.refresh()

    def refresh(self) -> None:
        """Push or pop the mode in this thread if necessary, except inside an intercepted call."""
        if getattr(self._thread, "depth", 0):
            return
        # keep this mode at the bottom of the stack, above the mode of torch's default device
        modes: list[Any] = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
        if self in modes and not self._open:
            modes.remove(self)
        elif self not in modes and self._open:
            modes.insert(bool(modes) and isinstance(modes[0], DeviceContext), self)
        for mode in modes:
            _push_mode(mode)

    def run_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, which writes gradients in C++, and check the buffers afterwards."""
        open_before = self._open.copy()
        try:
            return backward(*args, **kwargs)
        finally:
            for key, entry in open_before.items():
                if self._open.get(key) is entry and _is_changed(entry[1]):
                    del self._open[key]
                    _record_use(entry[1], "backward", writes=True)
            if self._open and self._open.keys() - open_before.keys():
                self.refresh()

    def check(self, name: str, reads: Tensors, writes: Tensors) -> None:
        """Record the open operations that conflict with these reads and writes."""
        with DisableTorchFunction():
            accesses = [(memory_view(t), False) for t in reads] + [
                (memory_view(t), True) for t in writes
            ]
        for key, (_, call) in list(self._open.items()):
            conflicts = [
                is_write
                for buffer, is_output in call.memory
                for memory, is_write in accesses
                if (is_write or is_output) and np.shares_memory(memory, buffer)
            ]
            if conflicts:
                self._open.pop(key, None)  # report only once
                _record_use(call, name, writes=any(conflicts))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check the tensors of a call and execute it."""
        if torch.compiler.is_compiling():  # keeps this function out of compiled graphs
            return func(*args, **(kwargs or {}))
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        arguments = [*args, *kwargs.values()]
        if not self._open or name == "__get__" or not self._overlaps(arguments):
            return self._call(func, args, kwargs)
        if name in _READ_WITHOUT_OPERATOR:
            self.check(name, tensors_in(arguments), ())
        if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            return self._call(func, args, kwargs)  # the tap checks it
        with _Operators(self, name):
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        thread = self._thread
        thread.depth = getattr(thread, "depth", 0) + 1
        try:
            return func(*args, **kwargs)
        finally:
            thread.depth -= 1

    def _overlaps(self, values: Any) -> bool:
        """Return whether any of these tensors may overlap an open buffer."""
        with DisableTorchFunction():
            views = [*map(memory_view, tensors_in(values))]
        return any(
            np.may_share_memory(memory, buffer)
            for memory in views
            for _, call in list(self._open.values())
            for buffer, _ in call.memory
        )


class _Operators(TorchDispatchMode):
    """A dispatch mode that checks the operators of a call."""

    supports_higher_order_operators = True

    def __init__(self, buffers: OpenBuffers, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers, self._name = buffers, name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check the tensors that an operator reads or writes, and call it."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and not _ignores_values(schema.name):
            reads: list[torch.Tensor] = []
            writes: list[torch.Tensor] = []
            for i, argument in enumerate(schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                alias = argument.alias_info
                if alias is None:
                    reads += tensors_in(value)
                elif alias.is_write:
                    writes += tensors_in(value)
            self._buffers.check(self._name, reads, writes)
        return func(*args, **kwargs)


def _is_changed(call: _Call) -> bool:
    """Return whether a call's tensors have changed, even if no mode intercepted the change."""
    return any(tensor._version != version for tensor, version in call.versions)


def _record_use(call: _Call, name: str, writes: bool) -> None:
    call.recorder.record(
        call.recorder.next_seq(),
        Op.TOUCH,
        State.COMPLETED,
        match=str(call.seq),
        attributes={"function": name, **({"writes": True} if writes else {})},
        where=user_line(),
    )


def _ignores_values(operator: str) -> bool:
    """Return whether an operator uses a tensor's shape but not its values, as zeros_like does."""
    name = operator.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _has_own_version(tensor: torch.Tensor) -> bool:
    """Return whether the version counter covers exactly this tensor's memory."""
    is_supported = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_inference()
    # a one-element view shares its counter with the empty chunks of its base
    is_shared = tensor.numel() == 1 and tensor._base is not None
    is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    return is_supported and is_whole and not is_shared


def memory_view(tensor: torch.Tensor) -> NDArray[Any]:
    """Return an array over a tensor's memory on any device; the values are never read.

    >>> pairs = torch.zeros(4, 2)
    >>> np.shares_memory(memory_view(pairs[::2]), memory_view(pairs[1]))
    False
    """
    size = tensor.element_size()
    try:
        if not tensor.data_ptr() or not tensor.numel():
            return np.empty(0)
        interface = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
        }
    except RuntimeError:  # the tensor is nested or has no storage
        return np.empty(0)
    return np.asarray(SimpleNamespace(__array_interface__=interface))
