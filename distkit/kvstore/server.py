"""The parameter server: one shard of the weights.  Li et al., 2014.

::

    worker:  pull w            server:  push from a worker: put its gradient into the inbox
             g = ∇L(w; batch)           quorum reached:     update w with the sum, version + 1
             push g                     pull:               answer once w holds the worker's
                                                            own gradients

One number spans the designs: ``quorum = 1`` updates at every push (*asynchronous*: nobody
waits, gradients are stale), ``quorum = N`` updates when every worker's gradient is there
(*synchronous*: all compute from the same version, and wait for the slowest).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distkit.errors import KVStoreError
from distkit.kvstore.messages import (
    Answer,
    Describe,
    Init,
    Key,
    Pull,
    Push,
    Reply,
    Request,
    SetOptimizer,
    error,
)
from distkit.kvstore.optimizer import SGD, from_spec
from distkit.kvstore.placement import Layout, dtype_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Entry:
    """A key on this server.

    ``value`` is replaced, never changed in place: an answer on its way keeps the version it
    was asked for. ``inbox`` holds the gradients that wait for a quorum, oldest first, of each
    worker that has any; ``waiting`` the pulls that wait for a version.
    """

    layout: Layout
    value: Tensor
    version: int = 0
    momentum: Tensor | None = None
    inbox: dict[int, deque[Push]] = field(default_factory=dict)
    waiting: list[tuple[Pull, int]] = field(default_factory=list)

    def put(self, push: Push) -> None:
        """Keep a gradient until its round is complete."""
        self.inbox.setdefault(push.node, deque()).append(push)

    def take_round(self) -> list[Push]:
        """The oldest gradient of each worker, in the order of workers: same sum in every run."""
        pushes = [self.inbox[worker].popleft() for worker in sorted(self.inbox)]
        self.inbox = {worker: rest for worker, rest in self.inbox.items() if rest}
        return pushes

    def reply(self, request: Request, value: Tensor | None = None) -> Reply:
        """Done, at the present version."""
        return Reply(
            request.run, request.node, request.number, self.version,
            self.layout.shape, self.layout.dtype, value,
        )  # fmt: skip


@dataclass(frozen=True)
class Update:
    """An update about to be applied to ``entry``, whose version it raises by one.

    ``staleness`` of each gradient: how many updates the value has seen since its worker
    pulled it.
    """

    key: Key
    entry: Entry
    workers: tuple[int, ...]
    staleness: tuple[int, ...]


#: Called with each update, entered before it is computed and left after.
Watch = Callable[[Update], AbstractContextManager[object]]


class KVServer:
    """A shard of the weights: messages in, answers out, no I/O.

    Args:
        quorum: how many workers' gradients make an update: 1 = asynchronous, all = synchronous.
        must_update: refuse gradients while no optimizer is set. Without one the sum of a round
            *replaces* the value, which makes sense only if the round is everybody's.
        watch: a context manager around each update.

    >>> import torch
    >>> server = KVServer(quorum=2)
    >>> one = torch.ones(1)
    >>> [r.version for r in server.handle(Init(0, 0, 0, "w", (1,), "float32", one))]
    [0]
    >>> server.handle(Push(0, 0, 1, "w", (1,), 0, 3 * one))[0].version   # waits for worker 1
    0
    >>> server.handle(Pull(0, 0, 2, "w"))                                # so does this
    []
    >>> [str(r.value) for r in server.handle(Push(0, 1, 0, "w", (1,), 0, 4 * one))]
    ['None', 'tensor([7.])']
    """

    def __init__(
        self, quorum: int, *, must_update: bool = False, watch: Watch = nullcontext
    ) -> None:
        self.quorum, self.must_update, self.watch = quorum, must_update, watch
        self.optimizer: SGD | None = None
        self.entries: dict[Key, Entry] = {}
        self._early: dict[Key, list[Init]] = defaultdict(list)

    def handle(self, request: Request) -> list[Answer]:
        """Answers to this request, and to others that waited for it."""
        try:
            match request:
                case Init():
                    return self._init(request)
                case Push():
                    return self._push(request)
                case Pull():
                    return self._pull(request)
                case Describe():
                    return [self._entry("pull of", request.key).reply(request)]
                case SetOptimizer():
                    return self._set_optimizer(request)
            raise KVStoreError(f"a server has no answer to {type(request).__name__}.")
        except KVStoreError as refusal:
            return [error(request, refusal)]

    def _init(self, init: Init) -> list[Answer]:
        """Worker 0's value counts; the others' must have its shape, and wait for it."""
        entry, layout = self.entries.get(init.key), Layout(init.shape, init.dtype)
        if entry is not None:
            entry.layout.check("init of", init.key, layout)
            if init.value is not None:
                raise KVStoreError(
                    f"init of {init.key!r}, which this run has initialised already. "
                    "Change its value with push, or use another key."
                )
            return [entry.reply(init)]
        if init.value is None:
            self._early[init.key].append(init)
            return []
        entry = self.entries[init.key] = Entry(layout, init.value)
        early = self._early.pop(init.key, [])
        return [entry.reply(init), *(answer for i in early for answer in self.handle(i))]

    def _push(self, push: Push) -> list[Answer]:
        entry = self._entry("push of", push.key)
        self._admit(push, entry)
        entry.put(push)
        if len(entry.inbox) == self.quorum:
            self._update(push.key, entry)
        return [entry.reply(push), *self._due(entry)]

    def _update(self, key: Key, entry: Entry) -> None:
        """Apply the sum of a round's gradients."""
        pushes = entry.take_round()
        staleness = tuple(entry.version - p.version for p in pushes)
        with self.watch(Update(key, entry, tuple(p.node for p in pushes), staleness)):
            gradient = _sum([p.value for p in pushes])
            if self.optimizer is None:
                entry.value = gradient
            else:
                entry.value, entry.momentum = self.optimizer.update(
                    entry.value, gradient, entry.momentum
                )
        entry.version += 1

    def _pull(self, pull: Pull) -> list[Answer]:
        """Wait for as many updates as the worker has gradients in the inbox: async, none."""
        entry = self._entry("pull of", pull.key)
        own = len(entry.inbox.get(pull.node, ()))
        entry.waiting.append((pull, entry.version + own))
        return self._due(entry)

    def _due(self, entry: Entry) -> list[Answer]:
        """The pulls whose version has come."""
        due = [pull for pull, at_least in entry.waiting if at_least <= entry.version]
        entry.waiting = [waits for waits in entry.waiting if waits[1] > entry.version]
        return [entry.reply(pull, entry.value) for pull in due]

    def _set_optimizer(self, request: SetOptimizer) -> list[Answer]:
        optimizer = from_spec(request.name, request.options)
        if self.optimizer not in (None, optimizer):
            raise KVStoreError(
                f"set_optimizer with {optimizer}, but the servers have {self.optimizer}. "
                "Give the same on every worker, once per run."
            )
        self.optimizer = optimizer
        return [Reply(request.run, request.node, request.number)]

    def _entry(self, what: str, key: Key) -> Entry:
        if key not in self.entries:
            raise KVStoreError(
                f"{what} {key!r}, a key that this run has not initialised. "
                f"Call kv.init({key!r}, value) on every worker first."
            )
        return self.entries[key]

    def _admit(self, push: Push, entry: Entry) -> None:
        """Refuse what could not be applied: an accepted gradient is applied exactly once."""
        entry.layout.check("push of", push.key, Layout(push.shape, dtype_name(push.value)))
        if push.value.shape != entry.value.shape:
            raise KVStoreError(f"push of {push.key!r} with {push.value.numel()} elements, "
                               f"but this server's part has {entry.value.numel()}.")  # fmt: skip
        if self.must_update and self.optimizer is None:
            raise KVStoreError(
                f"push of {push.key!r} without an optimizer: dist_async applies each gradient "
                "as it comes, so the servers must know how. Call kv.set_optimizer("
                "kvstore.SGD(learning_rate=...)) on every worker before the first push."
            )
        if self.optimizer is not None and not entry.value.is_floating_point():
            raise KVStoreError(
                f"push of {push.key!r}: an optimizer cannot update {entry.layout}. "
                "Use a floating-point tensor, or no optimizer."
            )


def _sum(gradients: list[Tensor]) -> Tensor:
    """The sum, in the order given; one gradient is its own sum."""
    total: Any = gradients[0]
    if len(gradients) > 1:
        total = total + gradients[1]
        for g in gradients[2:]:
            total += g
    return total  # type: ignore[no-any-return]
