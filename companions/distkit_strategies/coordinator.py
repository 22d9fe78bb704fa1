"""Training by scheduled functions: worker 0 coordinates, the other workers run what it schedules.

::

    worker 0                                             workers 1, 2, …
    coordinator = ClusterCoordinator(strategy)           serve, until worker 0's function returns
    coordinator.schedule(step, args)  ───function───►    pull the variables, run it: it pushes
                                      ◄───result─────    gradients to the servers
    coordinator.join()

A function travels with all that it captures, but for the strategy's variables: each worker has
its own, which it pulls before each function. When a worker dies, another takes its place, and
its function runs again. The servers know a function's pushes by its number: they count once.
"""

from __future__ import annotations

import io
import pickle
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import cloudpickle
import zmq
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distkit import kvstore
from distkit.errors import StrategyError
from distkit.kvstore.transport.sockets import context, listen_on, open_socket
from distkit.recording.recorder import mark
from distkit.recording.trouble import Dropped
from distkit_strategies.parameter_server import ParameterServerStrategy
from distkit_strategies.variables import owned

#: How long a worker waits for an answer before it asks again [ms]: the coordinator may be another
#: process than before, or have ended.
_RETRY = 200

#: The note with the coordinator's address, and its text at the end.
_NOTE, _OVER = "coordinator", "over"

#: How many functions may wait for a worker before ``schedule`` does.
QUEUE = 256


class Worker(NamedTuple):
    """A worker's process: its rank, and how many had its place before."""

    rank: int
    life: int


class FunctionQueue:
    """Which worker runs which scheduled function, and which run again: messages in, no I/O.

    ::

        worker w, life l:  ready ──────► its earlier life's function, if it ran one, is pending
                           finished f ─► f is over, whichever worker ran it; other runs do not count

    >>> queue = FunctionQueue()
    >>> queue.schedule("f"), queue.schedule("g")
    (0, 1)
    >>> queue.ready(Worker(1, 0)); queue.assign()
    [(Worker(rank=1, life=0), 0)]
    >>> queue.ready(Worker(1, 1)); queue.assign()        # worker 1 has died: again
    [(Worker(rank=1, life=1), 0)]
    >>> queue.finished(Worker(1, 1), 0), queue.assign()
    ('f', [(Worker(rank=1, life=1), 1)])
    """

    def __init__(self) -> None:
        self.unfinished: dict[int, Any] = {}  # functions by number
        self.pending: deque[int] = deque()
        #: What each worker runs, if anything; in the order in which they became free.
        self.workers: dict[Worker, int | None] = {}
        self._scheduled = 0

    @property
    def floor(self) -> int:
        """All functions with a lower number are over."""
        return min(self.unfinished, default=self._scheduled)

    def schedule(self, function: Any) -> int:
        """The number of a new function."""
        number = self._scheduled
        self._scheduled += 1
        self.unfinished[number] = function
        self.pending.append(number)
        return number

    def ready(self, worker: Worker) -> None:
        """A worker asks for a function: what an earlier life of it was running runs again."""
        for other in [w for w in self.workers if w.rank == worker.rank and w != worker]:
            if other.life > worker.life:
                return
            number = self.workers.pop(other)
            if number is not None:
                self.pending.appendleft(number)
        self.workers.setdefault(worker)

    def finished(self, worker: Worker, number: int) -> Any:
        """A worker has run a function: it, if this is its first result, else None."""
        if number in self.pending:  # its worker was taken for dead
            self.pending.remove(number)
        self.workers = {w: n for w, n in self.workers.items() if n != number}
        self.ready(worker)
        return self.unfinished.pop(number, None)

    def assign(self) -> list[tuple[Worker, int]]:
        """Hand pending functions to idle workers."""
        free = [worker for worker, number in self.workers.items() if number is None]
        made = list(zip(free, self.pending, strict=False))
        for worker, number in made:
            self.pending.popleft()
            self.workers[worker] = number
        return made

    def cancel(self) -> list[Any]:
        """Forget the functions that no worker runs yet."""
        cancelled = [self.unfinished.pop(number) for number in self.pending]
        self.pending.clear()
        return cancelled


class RemoteValue:
    """The result of a scheduled function, once it has run."""

    def __init__(self, coordinator: ClusterCoordinator, name: str, function: bytes) -> None:
        self._coordinator, self._name, self._function = coordinator, name, function
        self._outcome: tuple[Any, BaseException | None] | None = None

    def fetch(self) -> Any:
        """Wait for the result and return it.

        Raises:
            StrategyError: the function was cancelled.
            Exception: what the function raised.
        """
        while self._outcome is None:
            self._coordinator._receive(None)
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    get = fetch

    def __reduce__(self) -> Any:
        """Pickle the value, as an argument of another function."""
        return itemgetter(0), ((self.fetch(),),)


class PerWorkerIterator:
    """An iterator over each worker's own dataset, for the arguments of scheduled functions."""

    def __init__(self, dataset: int, number: int) -> None:
        self.key = dataset, number

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "next() of a per-worker iterator on the coordinator: each worker has its own batches. "
            "Give it to a function: coordinator.schedule(step, args=(iterator,))."
        )


class PerWorkerDataset:
    """A dataset that each worker makes for itself: iterators of it are arguments of functions."""

    def __init__(self, number: int) -> None:
        self._number, self._iterators = number, 0

    def __iter__(self) -> PerWorkerIterator:
        self._iterators += 1
        return PerWorkerIterator(self._number, self._iterators)


class ClusterCoordinator:
    """Schedules functions on the workers of a :class:`ParameterServerStrategy`.

    Every worker calls it at the same place, when all variables exist. On worker 0 it returns; on
    the others it does not: they run scheduled functions until worker 0's function returns, and
    have no result. Before that it waits for the functions that are not over.

    A function whose worker dies runs again, in the process that takes its place, and its
    gradients count once. If worker 0 dies, its function begins again: what it schedules has
    the same numbers, and gradients that the servers have are not counted again.

    Buffers are not shared: a function that changes one of floating-point numbers, as batch
    normalization does, is an error.

    Args:
        strategy: with ``mode="async"``.

    Raises:
        StrategyError: another strategy, one that has a coordinator, no servers, or no worker
            beside worker 0.

    Example:
        >>> def train(strategy):
        ...     with strategy.scope():
        ...         model = torch.nn.Linear(2, 1)
        ...         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     coordinator = ClusterCoordinator(strategy)
        ...     for x, y in batches:
        ...         coordinator.schedule(strategy.run, args=(step, (x, y)))
        ...     coordinator.join()
        >>> dk.Cluster(workers=3, servers=1).run(train, ParameterServerStrategy())  # doctest: +SKIP

    Source:
        TensorFlow, ``tf.distribute.coordinator.ClusterCoordinator``.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy) or strategy.mode != "async":
            raise StrategyError(
                f"ClusterCoordinator({strategy!r}): a function runs when a worker is free, "
                'so the strategy must be dk.strategies.ParameterServerStrategy(mode="async").'
            )
        store, node = strategy.store, kvstore.here()
        assert node is not None
        if node.workers < 2:
            raise StrategyError(
                "ClusterCoordinator in a cluster with one worker, which coordinates: there is "
                "none to run functions. Start dk.Cluster(workers=3, servers=1)."
            )
        if strategy.coordinated:
            raise StrategyError(
                "A second ClusterCoordinator of the same strategy: its workers run what the first "
                "one schedules until this run ends. Make one, and use it everywhere."
            )
        self.strategy, strategy.coordinated = strategy, True
        if node.index:
            try:
                _Server(strategy, node).serve()
            finally:
                strategy.coordinated = False  # the run is over
        self._queue, self._store = FunctionQueue(), store
        self._datasets: list[bytes] = []
        self._sent: dict[Worker, int] = {}  # how many of them a worker has
        self._connections: dict[Worker, bytes] = {}
        self._error: BaseException | None = None
        self._socket = open_socket(context(), zmq.ROUTER, node.keys)
        endpoint = _endpoint(node)
        self._socket.bind(endpoint)
        if node.address:
            endpoint = f"{listen_on(self._socket, node.address)} {endpoint}"
        store.note(_NOTE, endpoint)
        store.at_end.append(self._close)

    # -- TensorFlow's calls ---------------------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RemoteValue:
        """Have a worker run a function, and return at once.

        Args:
            fn: runs on one worker. Gradients that an optimizer applies go to the servers if it
                does so in ``strategy.run``.
            args: its arguments: any that can be pickled, values of other functions, and
                iterators over datasets of :meth:`create_per_worker_dataset`.
            kwargs: likewise.

        Raises:
            Exception: a function that was scheduled before has raised it; those that waited for
                a worker are cancelled.
        """
        while len(self._queue.pending) >= QUEUE:
            self._receive(None)
        self._check()
        value = RemoteValue(
            self, _name(fn, args), _pack((fn, tuple(args), dict(kwargs or {})), self.strategy)
        )
        value._name = f"function {self._queue.schedule(value)}, {value._name},"
        self._assign()
        return value

    def join(self) -> None:
        """Wait until all scheduled functions are over; then this worker's variables are current.

        Raises:
            Exception: one of them has raised it; those that waited for a worker are cancelled.
        """
        self._finish()
        self.strategy.pull()

    def done(self) -> bool:
        """True if all scheduled functions are over.

        Raises:
            Exception: as :meth:`join`.
        """
        self._check()
        return not self._queue.unfinished

    def fetch(self, values: Any) -> Any:
        """The results of functions: each :class:`RemoteValue` in a structure becomes its value.

        Raises:
            Exception: as :meth:`RemoteValue.fetch`.
        """
        return pytree.tree_map_only(RemoteValue, RemoteValue.fetch, values)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """A dataset that each worker makes by calling ``dataset_fn()``, when it first needs it.

        A process that takes a dead worker's place makes it again, and begins at its beginning.

        Args:
            dataset_fn: returns an iterable, such as ``strategy.distribute_dataset(data, 128)``.
        """
        self._datasets.append(_pack(dataset_fn, self.strategy))
        return PerWorkerDataset(len(self._datasets) - 1)

    # -- messages of the workers ----------------------------------------------------------------

    def _receive(self, timeout: int | None) -> None:
        """Handle what workers have sent; wait at most this long for something [ms]."""
        while self._socket.poll(timeout):
            connection, message = self._socket.recv_multipart()
            worker, done = pickle.loads(message)
            self._connections[worker] = connection
            if done is None:
                self._queue.ready(worker)
            else:
                self._finished(worker, *done)
            timeout = 0
        self._assign()

    def _finished(self, worker: Worker, number: int, result: bytes, where: str) -> None:
        if (done := self._queue.finished(worker, number)) is None:
            return
        done._outcome = _, error = pickle.loads(result)
        done._function = b""
        if where:
            error.__cause__ = StrategyError(where)
        if error is not None and self._error is None:
            self._error, reason = error, f"{done._name} raised {type(error).__name__}: {error}"
            for value in self._queue.cancel():
                value._outcome = None, StrategyError(f"{value._name} was cancelled: {reason}")

    def _assign(self) -> None:
        for worker, number in self._queue.assign():
            value, known = self._queue.unfinished[number], self._sent.get(worker, 0)
            makers = {n: made for n, made in enumerate(self._datasets) if n >= known}
            self._sent[worker] = len(self._datasets)
            self._send(worker, (number, self._queue.floor, value._name, value._function, makers))

    def _send(self, worker: Worker, what: Any) -> None:
        self._socket.send_multipart([self._connections[worker], pickle.dumps(what)])

    def _check(self) -> None:
        """Raise the error of a function, once, when no other is running any more."""
        self._receive(0)
        if self._error is not None:
            self._finish()

    def _finish(self) -> None:
        while self._queue.unfinished:
            self._receive(None)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _close(self) -> None:
        """End with worker 0's function: when all is over, the others leave theirs."""
        try:
            self._finish()
        finally:
            for worker in self._connections:
                self._send(worker, None)
            self.strategy.coordinated = False
            self._socket.close(linger=_RETRY)
            self._store.note(_NOTE, _OVER)

    def __reduce__(self) -> Any:
        raise StrategyError(
            "A scheduled function uses the coordinator, which stays on worker 0: schedule there."
        )


# -- a worker ---------------------------------------------------------------------------------


class _Server:
    """Runs functions on a worker until the coordinator has ended.

    Args:
        strategy: has the variables.
        node: this worker's place.

    Raises:
        Dropped: the coordinator has ended.
    """

    def __init__(self, strategy: ParameterServerStrategy, node: kvstore.Node) -> None:
        self._strategy, self._node = strategy, node
        self._worker, self._runs = Worker(node.index, node.life), 0
        self._makers: dict[int, bytes] = {}  # of datasets, as they came
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[tuple[int, int], Any] = {}
        self._socket: Any = None
        self._address = ""

    def serve(self) -> None:
        """Run what is scheduled."""
        done = None
        while (function := self._next(done)) is not None:
            number, floor, name, payload, makers = function
            self._makers |= makers
            done = number, *self._run(number, floor, name, payload)
            self._runs += 1
        if self._socket is not None:
            self._socket.close(linger=0)
        raise Dropped(f"ran {self._runs} scheduled functions")

    def _next(self, done: Any) -> Any:
        """Send a result, and get the next function; None when the coordinator has ended."""
        over = self._socket is None and self._connect()
        while not over:
            self._socket.send(pickle.dumps((self._worker, done)))
            if self._socket.poll(_RETRY):
                return pickle.loads(self._socket.recv())
            done, over = None, self._connect()
        return None

    def _run(self, number: int, floor: int, name: str, payload: bytes) -> tuple[bytes, str]:
        """A function's result or error, pickled, and where the error comes from."""
        value, error, where = None, None, ""
        try:
            fn, args, kwargs = self._unpack(payload)
            self._strategy.pull()
            once = self._strategy.store.once(number, floor)
            with once, mark(f"function {number}"), _kept_buffers(self._strategy):
                value = fn(*args, **kwargs)
        except Exception as raised:
            error, at = raised, f"{name} on worker {self._worker.rank}"
            where = f"{at} raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        return _packed(value, error, name, where), where

    def _unpack(self, payload: bytes) -> Any:
        reader = pickle.Unpickler(io.BytesIO(payload))
        reader.persistent_load = self._mine  # type: ignore[method-assign]
        return reader.load()

    def _mine(self, name: tuple[str, Any]) -> Any:
        """What this worker has of a name that :class:`_Pickler` has given."""
        kind, key = name
        if kind == "strategy":
            return self._strategy
        return self._strategy._variables[key] if kind == "variable" else self._iterator(key)

    def _iterator(self, key: tuple[int, int]) -> Any:
        dataset, _ = key
        if dataset not in self._datasets:
            self._datasets[dataset] = self._unpack(self._makers[dataset])()
        if key not in self._iterators:
            self._iterators[key] = iter(self._datasets[dataset])
        return self._iterators[key]

    def _connect(self) -> bool:
        """Connect to where the coordinator listens now; True if it has ended."""
        told = self._strategy.store.note(_NOTE)
        address = self._node.way(told or _endpoint(self._node))
        if told != _OVER and address != self._address:
            if self._socket is not None:
                self._socket.close(linger=0)
            self._address = address
            self._socket = open_socket(context(), zmq.DEALER, self._node.keys)
            self._socket.connect(address)
        return told == _OVER


def _endpoint(node: kvstore.Node) -> str:
    """The socket on which worker 0 listens for the workers of its host; each run has another."""
    return f"ipc://{node.folder}/co{zlib.crc32(repr(node.keys).encode())}"


@contextmanager
def _kept_buffers(strategy: ParameterServerStrategy) -> Iterator[None]:
    """Check that a scheduled function changes no buffer, of which the others would not know.

    Raises:
        StrategyError: it has.
    """
    buffers = [v for v in strategy._variables if not isinstance(v, nn.Parameter)]
    before = [(b, b.nan_to_num()) for b in buffers if b.is_floating_point()]
    yield
    for buffer, was in before:
        if not buffer.nan_to_num().equal(was):
            raise StrategyError(
                f"A scheduled function changed {owned(buffer)[1]}, a buffer: under a "  # type: ignore[index]
                "ClusterCoordinator each worker would have its own, and the coordinator none. "
                "Put such layers into eval() mode, use nn.GroupNorm or nn.LayerNorm, or "
                "return the numbers from the function."
            )


# -- what travels -----------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value, but for what each worker has itself."""

    def __init__(self, file: io.BytesIO, strategy: ParameterServerStrategy) -> None:
        super().__init__(file)
        self._strategy = strategy
        self._variables = {id(v): n for n, v in enumerate(strategy._variables)}

    def persistent_id(self, it: Any) -> tuple[str, Any] | None:
        """The name of what does not travel."""
        if it is self._strategy:
            return "strategy", None
        if isinstance(it, Tensor) and id(it) in self._variables:
            return "variable", self._variables[id(it)]
        return ("iterator", it.key) if isinstance(it, PerWorkerIterator) else None


def _pack(it: Any, strategy: ParameterServerStrategy) -> bytes:
    file = io.BytesIO()
    _Pickler(file, strategy).dump(it)
    return file.getvalue()


def _packed(value: Any, error: Exception | None, name: str, where: str) -> bytes:
    """A result or an error; if it cannot be pickled or unpickled, an error that says so."""
    try:
        result: bytes = cloudpickle.dumps((value, error))
        pickle.loads(result)
    except Exception as why:
        unsendable = (
            f"The result of {name} a {type(value).__name__}, cannot be pickled and unpickled: "
            f"{type(why).__name__}: {why}. Return tensors, numbers, or other plain values."
        )
        result = pickle.dumps((None, StrategyError(where or unsendable)))
    return result


def _name(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """What a scheduled function is called: of ``strategy.run``, the replica function that it runs.

    >>> _name(len, ()), _name(ParameterServerStrategy().run, (abs, (1,)))
    ('len', 'abs')
    """
    if isinstance(getattr(fn, "__self__", None), ParameterServerStrategy) and args:
        fn = args[0]
    return getattr(fn, "__name__", type(fn).__name__)
