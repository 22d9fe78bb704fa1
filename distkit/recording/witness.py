"""Context of a call, noted beside it: what it meets, and what led to it.

At a call of a collective: that other ranks call something else there (then the call waits, see
:mod:`distkit.recording.rollcall`), and that an exception is under way on this rank. After a
backward pass: the parameters of DDP's models that it has left out.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from distkit.events import COLLECTIVES, WORLD
from distkit.recording.pending import Pending
from distkit.recording.recorder import is_users
from distkit.recording.rollcall import RollCall

#: So many parameters without a gradient are named.
_NAMED = 8

_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


_looking: Callable[[], None] | None = None  # after each backward pass


def look_after_backward() -> None:
    """From now on, keep in mind each model that DDP wraps, and look at them after a backward."""
    stock, backward = DistributedDataParallel.__init__, torch.autograd.backward

    @wraps(stock)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        _wrapped.add(self)

    @wraps(backward)
    def looking(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if _looking is not None and _wrapped and torch._C._current_graph_task_id() < 0:
            _looking()

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    torch.autograd.backward = looking


class Witness:
    """Looks at each collective of a run before it goes to the backend.

    Args:
        note: called with a word and what there is to know: ``"raising"`` with the call's number,
            the exception's text and line; ``"unreduced"`` with names of parameters.
        rollcall: compares the call with the other ranks'; None if nobody does.
        hold: waits until the run is over.
    """

    def __init__(
        self,
        note: Callable[[str, Any], None],
        rollcall: RollCall | None,
        hold: Callable[[], object],
    ) -> None:
        self._note, self._rollcall, self._hold = note, rollcall, hold
        self._told: list[str] = []
        left = [model for model in _wrapped if _without_gradient(model)]
        _wrapped.difference_update(left)  # by an earlier run, in the middle of a backward pass
        global _looking
        _looking = self.look_at_gradients

    def meet(self, group: str, members: list[int]) -> None:
        """A group is used for the first time."""
        if self._rollcall is not None and _over_gloo(group):
            self._rollcall.meet(group, members)

    def look(self, pending: Pending, limited: bool) -> None:
        """A collective is about to go to the backend; ``limited``: it gives up by itself."""
        if pending.op not in COLLECTIVES or pending.fields[-1] is not None:  # not comparable
            return
        error = sys.exc_info()[1]
        if error is not None and isinstance(error, Exception):
            self._note("raising", (pending.seq, *_told(error)))
        if self._rollcall is None or self._rollcall.fits(pending.op, pending.fields) or limited:
            return
        pending.recorder.wait_begins(pending)
        try:
            self._hold()
        except BaseException:
            pending.fail()
            raise
        finally:
            pending.recorder.wait_ends()

    def look_at_gradients(self) -> None:
        """A backward pass is over: note whether it has left parameters of DDP's models out."""
        missing = [name for model in list(_wrapped) for name in _without_gradient(model)]
        if missing != self._told:
            self._told = missing
            self._note("unreduced", missing)

    def close(self) -> None:
        """The run is over."""
        global _looking
        _looking = None
        if self._rollcall is not None:
            self._rollcall.close()


def _over_gloo(group: str) -> bool:
    """True if this is a group of torch's own making, and gloo carries it."""
    default = dist.group.WORLD if dist.is_initialized() else None
    for known, (backend, _) in c10d._world.pg_map.items():
        if known.group_name == group or (group == WORLD and known is default):
            return "gloo" in str(backend)
    return False


def _without_gradient(model: DistributedDataParallel) -> list[str]:
    """The parameters that a backward pass, which is over, has left out; [] for none."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        parameters = model.module.named_parameters()
        return [n for n, p in parameters if p.requires_grad and p.grad is None][:_NAMED] or ["?"]
    except AttributeError:  # it is not ready, or no longer
        return []
    return []


def _told(error: Exception) -> tuple[str, str]:
    """An exception's text, and the user's innermost line in its traceback."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:1000], _line(error.__traceback__)


def _line(trace: TracebackType | None) -> str:
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
