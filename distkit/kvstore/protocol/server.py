"""The parameter server: one shard of the weights. Source: Li et al., 2014.

::

    worker:  pull w            server:  push from a worker: put its gradient into its round
             g = ∇L(w; batch)           round complete:     update w with the sum, version + 1
             push g                     pull:               respond once the worker may see w

The consistency model (:mod:`distkit.consistency`) decides when a round is complete and which
workers a pull waits for. *Synchronous*: all workers compute from the same version and wait for the
slowest. *Asynchronous*: no worker waits, and gradients may be stale. Other models are in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor

from distkit.consistency import Rule
from distkit.errors import KVStoreError
from distkit.kvstore.protocol.compression import unpack
from distkit.kvstore.protocol.messages import (
    Assign,
    AtBarrier,
    Departed,
    Finished,
    Init,
    Key,
    Pull,
    Push,
    Reply,
    Request,
    Response,
    SetOptimizer,
    error,
)
from distkit.kvstore.protocol.optimizer import OptimizerSpec, Updater, sum_tensors
from distkit.kvstore.protocol.placement import Layout, dtype_name


class Entry(Struct, eq=False):
    """A key on this server.

    ``value`` is replaced, never changed in place, so a response being sent keeps its version.
    ``rounds`` holds the gradients of incomplete rounds, by round and worker. ``waiting`` holds each
    unanswered pull and its worker's clock on arrival. ``clocks`` holds each worker's clock, and
    ``dropped`` the number of its gradients that arrived too late. ``accepted`` holds the number of
    each author's latest push.
    """

    key: Key
    layout: Layout
    value: Tensor
    init_id: tuple[int, int]  # node and number of the init that set the first value
    version: int = 0
    updater: Updater | None = None
    rounds: dict[int, dict[int, Push]] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    waiting: dict[tuple[int, int], tuple[Pull, int]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def arrived(self) -> dict[int, Push]:
        """The gradients of the current round that have arrived, by worker."""
        return self.rounds.get(self.version, {})

    def has_accepted(self, push: Push) -> bool:
        """Return whether this push has already been accepted.

        A worker repeats its pushes in order, and a function that runs again makes the same pushes,
        so it suffices to compare with the number of the latest push.
        """
        author, number = push.author
        return number <= self.accepted.get(author, -1)

    def reply(self, request: Request, value: Tensor | None = None) -> Reply:
        """Return the reply to a request, with the current version."""
        node, dropped = request.node, self.dropped.get(request.node, 0)
        return Reply(node, request.number, self.version, value, dropped, self.clocks.get(node, 0))


#: Returns a context manager that wraps an update, given the key's entry and the pushes.
UpdateContext = Callable[[Entry, list[Push]], AbstractContextManager[object]]


class KVServer:
    """A shard of the weights. It handles messages and returns responses, without I/O.

    Workers must initialize a key before they send other requests for it.

    Args:
        rule: the consistency model.
        workers: the ids of the workers.
        on_crash: the effect of a worker's crash on workers that wait for it. With "halt" they wait
            until the run ends, with "continue" the crashed worker is excluded, and with "replace"
            they wait for its replacement. Without rounds, a crashed worker is always excluded.
        require_optimizer: whether to reject gradients while no optimizer is set. Without an
            optimizer the sum of a round *replaces* the value, which is only meaningful if all
            workers contribute.
        update_context: returns a context manager for each update.

    >>> import torch
    >>> from distkit.consistency import Synchronous
    >>> server = KVServer(Synchronous(), workers=range(2))
    >>> one = torch.ones(1)
    >>> [r.version for r in server.handle(Init(0, 0, "w", (1,), "float32", one))]
    [0]
    >>> server.handle(Push(0, 1, "w", (1,), 0, 3 * one))[0].version  # the round waits for worker 1
    0
    >>> server.handle(Pull(0, 2, "w"))                               # the pull waits, too
    []
    >>> [str(r.value) for r in server.handle(Push(1, 0, "w", (1,), 0, 4 * one))]
    ['None', 'tensor([7.])']
    """

    def __init__(
        self,
        rule: Rule,
        workers: Collection[int],
        *,
        on_crash: str = "halt",
        require_optimizer: bool = False,
        update_context: UpdateContext = lambda entry, pushes: nullcontext(),
    ) -> None:
        self.rule, self.on_crash, self.update_context = rule, on_crash, update_context
        # members: the workers whose gradients are required
        self.require_optimizer, self.members = require_optimizer, set(workers)
        self.departed: dict[int, str] = {}  # cause of exit, by worker
        #: Workers whose gradients are not required until they leave the barrier.
        self.at_barrier: set[int] = set()
        #: The first request number of the replacement of each worker that has exited.
        self.first_numbers: dict[int, int] = {}
        #: Optimizers by key; the one for None updates all keys without a separate optimizer.
        self.optimizers: dict[Key | None, OptimizerSpec] = {}
        self.entries: dict[Key, Entry] = {}
        self._waiting_inits: list[Init] = []  # inits that wait for the first value of their key

    def handle(self, request: Request | Departed) -> list[Response]:
        """Handle a request or the exit of a worker; return all responses that can now be sent."""
        if isinstance(request, Departed):
            return self.handle_departure(request.peer, request.cause, request.first)
        if request.number < self.first_numbers.get(request.node, 0):
            return []  # sent by a process that has exited
        try:
            match request:
                case Init():
                    return self._init(request)
                case Push():
                    return self._push(request)
                case Pull():
                    return self._pull(request)
                case AtBarrier() | Finished():
                    return self._pause(request)
                case SetOptimizer():
                    return self._set_optimizer(request)
                case Assign():
                    return [self._assign(request)]
            raise KVStoreError(f"a server cannot handle {type(request).__name__}.")
        except KVStoreError as e:
            return [error(request, e)]

    def _init(self, init: Init) -> list[Response]:
        """Set the initializer's value; other inits wait for it, and must have the same layout."""
        entry = self.entries.get(init.key)
        if entry is None:
            if init.value is None:
                self._waiting_inits.append(init)
                return self._fail_waiting_inits(init.initializer)
            layout, init_id = Layout(init.shape, init.dtype), (init.node, init.number)
            entry = self.entries[init.key] = Entry(init.key, layout, init.value, init_id)
            inits, self._waiting_inits = self._waiting_inits, []
            return [entry.reply(init), *(response for i in inits for response in self.handle(i))]
        entry.layout.check("init of", init.key, init.shape, init.dtype)
        is_repeated = entry.init_id == (init.node, init.number) or init.node in self.first_numbers
        if init.value is not None and not is_repeated:
            raise KVStoreError(
                f"init of {init.key!r} failed: this run has already initialized the key. "
                "Change its value with push, or use another key."
            )
        return [entry.reply(init)]

    def _push(self, push: Push) -> list[Response]:
        entry = self.entries[push.key]
        if entry.has_accepted(push):
            return [entry.reply(push)]
        push = self._validate(push, entry)
        author, number = push.author
        entry.accepted[author] = number
        if push.node in self.at_barrier:  # all workers have passed the barrier
            for worker in self.at_barrier:
                self._join(worker)
            self.at_barrier = set()
        elif push.node not in self.members:
            self._join(push.node)
        round_and_clock = self.rule.assign_round(
            entry.clocks.get(push.node, 0), push.version, entry.version
        )
        if round_and_clock is None:
            entry.dropped[push.node] = entry.dropped.get(push.node, 0) + 1
            return [entry.reply(push)]
        n, entry.clocks[push.node] = round_and_clock
        entry.rounds.setdefault(n, {})[push.node] = push
        self._update(entry)
        return [entry.reply(push), *self._release_pulls(entry)]

    def _update(self, entry: Entry) -> None:
        """Apply the sum of the gradients of each complete round."""
        while entry.arrived and self.rule.complete(entry.arrived, self.members):
            # sorting by worker makes sums reproducible
            pushes = [push for _, push in sorted(entry.rounds.pop(entry.version).items())]
            with self.update_context(entry, pushes):
                self._apply(entry, sum_tensors([p.value for p in pushes]))
            entry.version += 1

    def _apply(self, entry: Entry, gradient: Tensor) -> None:
        """Update the value with a sum of gradients, which may be in float32 for a 16-bit value."""
        if (spec := self._optimizer(entry.key)) is None:
            entry.value = gradient.to(entry.value.dtype)
            return
        updater = entry.updater or Updater(spec, entry.value)
        if updater.spec is not spec:
            updater = updater.reconfigure(spec, entry.value)
        entry.updater, entry.value = updater, updater.update(entry.value, gradient)

    def _optimizer(self, key: Key) -> OptimizerSpec | None:
        return self.optimizers.get(key) or self.optimizers.get(None)

    def _pull(self, pull: Pull) -> list[Response]:
        entry = self.entries[pull.key]
        entry.waiting[pull.node, pull.number] = pull, entry.clocks.get(pull.node, 0)
        return self._release_pulls(entry)

    def _release_pulls(self, entry: Entry) -> list[Response]:
        """Return the replies to the pulls that no longer need to wait."""
        responses: list[Response] = []
        for pull_id, (pull, clock) in list(entry.waiting.items()):
            state = entry.version, entry.arrived, self.members, entry.clocks
            if not self.rule.awaits(clock, *state):
                del entry.waiting[pull_id]
                responses.append(entry.reply(pull, entry.value))
        return responses

    # -- workers that leave and join --------------------------------------------

    def handle_departure(self, worker: int, cause: str, first: int) -> list[Response]:
        """Handle the exit of a worker; return responses to requests that waited for it.

        ``first`` is the first request number of its replacement.
        """
        if first <= self.first_numbers.get(worker, 0):
            return []
        self.first_numbers[worker], self.departed[worker] = first, cause
        self.at_barrier.discard(worker)
        if self.on_crash == "continue" or not self.rule.has_rounds:
            self.members.discard(worker)
        for entry in self.entries.values():
            entry.waiting = {n: w for n, w in entry.waiting.items() if n[0] != worker}
        return [*self._fail_waiting_inits(worker), *self._advance_all()]

    def _fail_waiting_inits(self, initializer: int) -> list[Response]:
        """Fail the inits that wait for a value from a worker that has exited."""
        if initializer not in self.departed or self.on_crash == "replace":
            return []
        inits = [i for i in self._waiting_inits if i.initializer == initializer]
        self._waiting_inits = [i for i in self._waiting_inits if i.initializer != initializer]
        reason = (
            f"waits for the value of worker {initializer}, which has exited "
            f"({self.departed[initializer]})"
        )
        return [error(i, f"init of {i.key!r} {reason}. Run again.") for i in inits]

    def _pause(self, request: AtBarrier | Finished) -> list[Response]:
        """With "replace", stop waiting for a worker that is at a barrier or has finished.

        A replacement may repeat pushes of earlier rounds. These rounds must not wait for the other
        workers again.
        """
        if self.on_crash == "replace":
            self.members.discard(request.node)
            if isinstance(request, AtBarrier):
                self.at_barrier.add(request.node)
            else:
                self.at_barrier.discard(request.node)  # it sends no more pushes
        return [Reply(request.node, request.number), *self._advance_all()]

    def _advance_all(self) -> list[Response]:
        for entry in self.entries.values():
            self._update(entry)
        return [
            response for entry in self.entries.values() for response in self._release_pulls(entry)
        ]

    def _join(self, worker: int) -> None:
        """Add a worker at its first push after a barrier, or after it was replaced.

        Its clock starts no lower than the slowest worker's, so that no worker waits until it
        catches up.
        """
        for entry in self.entries.values():
            slowest = min((entry.clocks.get(m, 0) for m in self.members), default=0)
            entry.clocks[worker] = max(entry.clocks.get(worker, 0), slowest)
        self.members.add(worker)

    # -- the optimizer ----------------------------------------------------------

    def _set_optimizer(self, request: SetOptimizer) -> list[Response]:
        spec, keys = OptimizerSpec(request.name, request.options).check(), request.keys or (None,)
        current = {} if request.replace else self.optimizers
        conflicts = [current[k] for k in keys if current.get(k, spec) != spec]
        # a replacement may be unaware of a change
        if conflicts and request.node not in self.first_numbers:
            raise KVStoreError(
                f"set_optimizer got {spec}, but the servers have {conflicts[0]}. "
                "Set the same optimizer on every worker, once per run."
            )
        self.optimizers |= {k: spec for k in keys if k not in current}
        return [Reply(request.node, request.number)]

    def _assign(self, request: Assign) -> Reply:
        entry = self.entries[request.key]
        entry.value, entry.updater = request.value, None
        return entry.reply(request)

    # -- validation -------------------------------------------------------------

    def _validate(self, push: Push, entry: Entry) -> Push:
        """Decompress the gradient of a push; raise an error if it cannot be applied."""
        if push.threshold:
            value = unpack(push.value, push.threshold, entry.value.numel())
            push = replace(push, value=value.to(entry.value.dtype))
        entry.layout.check("push of", entry.key, push.shape, dtype_name(push.value))
        spec = self._optimizer(push.key)
        if self.require_optimizer and spec is None:
            raise KVStoreError(
                f"push of {push.key!r} needs an optimizer: dist_async applies each gradient when "
                "it arrives. Call kv.set_optimizer(kvstore.SGD(learning_rate=...)) on every worker "
                "before the first push."
            )
        if spec is not None and not entry.value.is_floating_point():
            raise KVStoreError(
                f"push of {entry.key!r}: an optimizer cannot update {entry.layout}. "
                "Use a floating-point tensor, or no optimizer."
            )
        return push
