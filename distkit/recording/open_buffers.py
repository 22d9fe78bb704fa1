"""Noticing that a program uses the buffer of an ``irecv`` before it has waited for it.

No message tells: the program reads whatever lies there, often even the right numbers. So while a
receive is open, torch's function mode shows us every call from Python with its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from distkit.events import Op, State
from distkit.recording.pending import Pending
from distkit.recording.recorder import user_line

#: What neither reads nor writes the values.
_HARMLESS = frozenset(
    """
    __get__ __getitem__ __len__ __hash__ size dim ndimension numel nelement stride storage_offset
    data_ptr element_size is_contiguous untyped_storage is_floating_point is_complex requires_grad_
    view view_as reshape flatten narrow select chunk split tensor_split unbind unsqueeze squeeze
    t transpose permute expand detach
""".split()
)


class OpenBuffers(TorchFunctionMode):
    """The buffers that are still to be filled; it is in force while there are any."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, tuple[int, int, Pending]] = {}  # by seq: from byte, to byte
        self._thread = 0  # where the mode is in force: it is a thread's own

    def add(self, pending: Pending) -> None:
        """A receive has begun, and its caller goes on."""
        begin, end = _bytes(pending.outputs[0])
        self._open[pending.seq] = begin, end, pending
        if not self._thread:
            self._thread = threading.get_ident()
            modes = _take_modes()
            modes.insert(bool(modes) and isinstance(modes[0], DeviceContext), self)
            _put_modes(modes)

    def remove(self, pending: Pending) -> None:
        """A receive has been waited for."""
        if self._open.pop(pending.seq, None) is not None and not self._open:
            self._withdraw()

    def clear(self) -> None:
        """The run is over."""
        self._open.clear()
        self._withdraw()

    def _withdraw(self) -> None:
        """Be in force no longer; not in the middle of a call that we look at."""
        if self._thread == threading.get_ident():
            modes = _take_modes()
            if self in modes:
                modes.remove(self)
                self._thread = 0
            _put_modes(modes)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at the tensors of a call, then make it."""
        if self._open and getattr(func, "__name__", "") not in _HARMLESS:
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                self._look(tensor, getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))

    def _look(self, tensor: torch.Tensor, name: str) -> None:
        begin, end = _bytes(tensor)
        for first, last, pending in list(self._open.values()):
            if begin < last and first < end and not pending.done:
                del self._open[pending.seq]  # once is enough
                recorder = pending.recorder
                seq, where = recorder.next_seq(), user_line(2)
                about: dict[str, Any] = {"attributes": {"function": name}, "where": where}
                for state in (State.STARTED, State.COMPLETED):
                    recorder.record(seq, Op.TOUCH, state, match=str(pending.seq), **about)


def _take_modes() -> list[Any]:
    """Empty the stack of modes. We stay at its bottom: the user's come and go at the top.

    At the very bottom torch wants its default device.
    """
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def _put_modes(modes: list[Any]) -> None:
    for mode in modes:
        _push_mode(mode)


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of the memory that a tensor covers."""
    try:
        begin, shape, strides = tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # a tensor of another kind, without memory of its own
        return 0, 0
    if 0 in shape:
        return 0, 0
    last = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
