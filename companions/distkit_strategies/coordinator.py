"""Training by scheduled functions: worker 0 schedules functions, and the other workers run them.

::

    worker 0                                             workers 1, 2, …
    coordinator = ClusterCoordinator(strategy)           serve, until worker 0's function returns
    coordinator.schedule(step, args)  ───function───►    pull the variables and run the function,
                                      ◄───result─────    which pushes gradients to the servers
    coordinator.join()

A function is sent with everything it captures except the strategy's variables. Each worker has its
own copies of the variables, and pulls their values before it runs a function. When a worker dies,
it is replaced and its function runs again. The servers identify each push by the number of the
function that made it, and apply it once.
"""

from __future__ import annotations

import io
import pickle
import traceback
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
from distkit.kvstore.transport.node import listen_on, open_socket
from distkit.recording.faults import LeaveFunction
from distkit.recording.recorder import mark
from distkit_strategies.parameter_server import ParameterServerStrategy
from distkit_strategies.variables import owner_of

#: Time after which a worker repeats a request [ms], because the coordinator may have been replaced
#: or may have exited.
_RETRY = 200

#: The name of the KVStore note with the coordinator's address, and the note's value after the
#: coordinator has ended.
_NOTE, _ENDED = "coordinator", "over"

#: Number of pending functions at which ``schedule`` blocks.
MAX_PENDING = 256


class Worker(NamedTuple):
    """A worker process: its rank, and the number of earlier processes of this rank."""

    rank: int
    incarnation: int


class FunctionQueue:
    """Assigns scheduled functions to workers, and reassigns functions of dead workers. No I/O.

    ::

        worker w, incarnation i:  ready ──────► the function of its earlier process is pending again
                                  finished f ─► f has finished; later results of f are ignored

    >>> queue = FunctionQueue()
    >>> queue.schedule("f"), queue.schedule("g")
    (0, 1)
    >>> queue.ready(Worker(1, 0)); queue.assign()
    [(Worker(rank=1, incarnation=0), 0)]
    >>> queue.ready(Worker(1, 1)); queue.assign()        # worker 1 was replaced
    [(Worker(rank=1, incarnation=1), 0)]
    >>> queue.finished(Worker(1, 1), 0), queue.assign()
    ('f', [(Worker(rank=1, incarnation=1), 1)])
    """

    def __init__(self) -> None:
        self.unfinished: dict[int, Any] = {}  # functions by number
        self.pending: deque[int] = deque()
        #: The function that each worker is running, if any, in the order in which workers became
        #: idle.
        self.workers: dict[Worker, int | None] = {}
        self._scheduled = 0

    def schedule(self, function: Any) -> int:
        """Add a function; return its number."""
        number = self._scheduled
        self._scheduled += 1
        self.unfinished[number] = function
        self.pending.append(number)
        return number

    def ready(self, worker: Worker) -> None:
        """Add a new worker as idle; the function of its earlier process becomes pending again."""
        for other in [w for w in self.workers if w.rank == worker.rank and w != worker]:
            if other.incarnation > worker.incarnation:
                return
            number = self.workers.pop(other)
            if number is not None:
                self.pending.appendleft(number)
        self.workers.setdefault(worker)

    def finished(self, worker: Worker, number: int) -> Any:
        """Mark a function as finished; return it for its first result, and None for later ones."""
        if number in self.pending:  # its worker was considered dead
            self.pending.remove(number)
        self.workers = {w: n for w, n in self.workers.items() if n != number}
        self.ready(worker)
        return self.unfinished.pop(number, None)

    def assign(self) -> list[tuple[Worker, int]]:
        """Assign pending functions to idle workers."""
        idle = [worker for worker, number in self.workers.items() if number is None]
        assignments = list(zip(idle, self.pending, strict=False))
        for worker, number in assignments:
            self.pending.popleft()
            self.workers[worker] = number
        return assignments

    def cancel(self) -> list[Any]:
        """Remove and return the functions that no worker has started."""
        canceled = [self.unfinished.pop(number) for number in self.pending]
        self.pending.clear()
        return canceled


class RemoteValue:
    """The future result of a scheduled function."""

    def __init__(self, coordinator: ClusterCoordinator, name: str, function: bytes) -> None:
        self._coordinator, self._name, self._function = coordinator, name, function
        self._outcome: tuple[Any, BaseException | None] | None = None

    def fetch(self) -> Any:
        """Wait for the result and return it.

        Raises:
            StrategyError: the function was canceled.
            Exception: the function raised.
        """
        while self._outcome is None:
            self._coordinator._receive(None)
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    get = fetch

    def __reduce__(self) -> Any:
        """Pickle the value, so that it can be an argument of another function."""
        return itemgetter(0), ((self.fetch(),),)


class PerWorkerIterator:
    """An iterator over each worker's dataset, to pass to scheduled functions."""

    def __init__(self, dataset: int, number: int) -> None:
        self.key = dataset, number

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "next() was called on a per-worker iterator on the coordinator, but only the workers "
            "have batches. Pass it to a function: coordinator.schedule(step, args=(iterator,))."
        )


class PerWorkerDataset:
    """A dataset that each worker creates; its iterators are arguments of scheduled functions."""

    def __init__(self, number: int) -> None:
        self._number, self._iterators = number, 0

    def __iter__(self) -> PerWorkerIterator:
        self._iterators += 1
        return PerWorkerIterator(self._number, self._iterators)


class ClusterCoordinator:
    """Schedules functions on the workers of a :class:`ParameterServerStrategy`.

    Every worker creates it at the same point, after all variables. On worker 0, the constructor
    returns. On the other workers it does not: they run scheduled functions until worker 0's run
    ends, and have no result. When worker 0's function returns, worker 0 waits until all scheduled
    functions have finished.

    If a worker dies, it is replaced. The function that it was running starts again, and its
    gradients are applied once. If worker 0 dies, its function starts again. Scheduled functions
    then get the same numbers, so the servers do not apply gradients twice.

    Buffers are not shared. A function that changes a floating-point buffer, such as a running mean
    of batch normalization, raises an error.

    Args:
        strategy: a strategy with ``mode="async"``.

    Raises:
        StrategyError: the strategy is not asynchronous or already has a coordinator, or the cluster
            has no servers or no worker besides worker 0.

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
                f"ClusterCoordinator needs an asynchronous strategy, but {strategy!r} is not "
                'asynchronous. Use dk.strategies.ParameterServerStrategy(mode="async").'
            )
        store, node = strategy.store, kvstore.current_node()
        assert node is not None
        if node.workers < 2:
            raise StrategyError(
                "The cluster has one worker, which coordinates, and no worker to run functions. "
                "Start dk.Cluster(workers=3, servers=1)."
            )
        if strategy.coordinated:
            raise StrategyError(
                "The strategy already has a ClusterCoordinator, whose functions the workers run "
                "until this run ends. Create one coordinator, and use it everywhere."
            )
        self.strategy, strategy.coordinated = strategy, True
        if node.index:
            try:
                _FunctionRunner(strategy, node).serve()
            finally:
                strategy.coordinated = False  # the run has ended
        self._queue, self._store = FunctionQueue(), store
        self._datasets: list[bytes] = []
        self._sent: dict[Worker, int] = {}  # number of datasets sent to each worker
        self._connections: dict[Worker, bytes] = {}
        self._error: BaseException | None = None
        self._socket = open_socket(zmq.Context.instance(), zmq.ROUTER, node.keys)
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
        """Schedule a function on a worker, and return without waiting for its result.

        If :data:`MAX_PENDING` functions are pending, first wait until a worker starts one.

        Args:
            fn: the function. Gradients that an optimizer applies in ``strategy.run`` go to the
                servers.
            args: the arguments: picklable objects, results of other functions, and iterators over
                datasets from :meth:`create_per_worker_dataset`.
            kwargs: the keyword arguments, of the same types.

        Raises:
            Exception: an earlier function raised; pending functions are canceled.
        """
        while len(self._queue.pending) >= MAX_PENDING:
            self._receive(None)
        self._check()
        value = RemoteValue(
            self, _name(fn, args), _pack((fn, tuple(args), dict(kwargs or {})), self.strategy)
        )
        value._name = f"function {self._queue.schedule(value)}, {value._name},"
        self._assign()
        return value

    def join(self) -> None:
        """Wait until all scheduled functions have finished, then pull the variables.

        Raises:
            Exception: a function raised; pending functions are canceled.
        """
        self._finish()
        self.strategy.pull()

    def done(self) -> bool:
        """Return whether all scheduled functions have finished.

        Raises:
            Exception: see :meth:`join`.
        """
        self._check()
        return not self._queue.unfinished

    def fetch(self, values: Any) -> Any:
        """Return a structure with each :class:`RemoteValue` replaced by its value.

        Raises:
            Exception: see :meth:`RemoteValue.fetch`.
        """
        return pytree.tree_map_only(RemoteValue, RemoteValue.fetch, values)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """Create a dataset on each worker by calling ``dataset_fn()``, on first use.

        The replacement of a dead worker creates the dataset again and starts from its beginning.

        Args:
            dataset_fn: a function that returns an iterable, such as
                ``strategy.distribute_dataset(data, 128)``.
        """
        self._datasets.append(_pack(dataset_fn, self.strategy))
        return PerWorkerDataset(len(self._datasets) - 1)

    # -- messages from the workers --------------------------------------------------------------

    def _receive(self, timeout: int | None) -> None:
        """Handle the workers' messages; wait up to ``timeout`` ms for the first (None: forever)."""
        while self._socket.poll(timeout):
            connection, message = self._socket.recv_multipart()
            worker, result = pickle.loads(message)
            self._connections[worker] = connection
            if result is None:
                self._queue.ready(worker)
            else:
                self._handle_result(worker, *result)
            timeout = 0
        self._assign()

    def _handle_result(self, worker: Worker, number: int, result: bytes, traceback_: str) -> None:
        if (value := self._queue.finished(worker, number)) is None:
            return
        value._outcome = _, error = pickle.loads(result)
        value._function = b""
        if traceback_:
            error.__cause__ = StrategyError(traceback_)
        if error is not None and self._error is None:
            self._error, reason = error, f"{value._name} raised {type(error).__name__}: {error}"
            for other in self._queue.cancel():
                other._outcome = None, StrategyError(f"{other._name} was canceled: {reason}")

    def _assign(self) -> None:
        for worker, number in self._queue.assign():
            value, sent = self._queue.unfinished[number], self._sent.get(worker, 0)
            factories = {n: factory for n, factory in enumerate(self._datasets) if n >= sent}
            self._sent[worker] = len(self._datasets)
            self._send(worker, (number, value._name, value._function, factories))

    def _send(self, worker: Worker, message: Any) -> None:
        self._socket.send_multipart([self._connections[worker], pickle.dumps(message)])

    def _check(self) -> None:
        """If a function has raised, wait for the running functions, then raise its error once."""
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
        """Wait until all scheduled functions have finished, then release the workers."""
        try:
            self._finish()
        finally:
            for worker in self._connections:
                self._send(worker, None)
            self.strategy.coordinated = False
            self._socket.close(linger=_RETRY)
            self._store.note(_NOTE, _ENDED)

    def __reduce__(self) -> Any:
        raise StrategyError(
            "A scheduled function uses the coordinator, which exists only on worker 0. Schedule "
            "all functions from worker 0."
        )


# -- a worker ---------------------------------------------------------------------------------


class _FunctionRunner:
    """Runs functions on a worker until the coordinator has ended.

    Args:
        strategy: the strategy of the variables.
        node: this worker.

    Raises:
        LeaveFunction: the coordinator has ended.
    """

    def __init__(self, strategy: ParameterServerStrategy, node: kvstore.Node) -> None:
        self._strategy, self._node = strategy, node
        self._worker, self._runs = Worker(node.index, node.incarnation), 0
        self._factories: dict[int, bytes] = {}  # pickled functions that create datasets
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[tuple[int, int], Any] = {}
        self._socket: Any = None
        self._address = ""

    def serve(self) -> None:
        """Run scheduled functions."""
        result = None
        while (function := self._next(result)) is not None:
            number, name, payload, factories = function
            self._factories |= factories
            result = number, *self._run(number, name, payload)
            self._runs += 1
        if self._socket is not None:
            self._socket.close(linger=0)
        raise LeaveFunction(f"ran {self._runs} scheduled functions")

    def _next(self, result: Any) -> Any:
        """Send a result and return the next function, or None after the coordinator has ended."""
        ended = self._socket is None and self._connect()
        while not ended:
            self._socket.send(pickle.dumps((self._worker, result)))
            if self._socket.poll(_RETRY):
                return pickle.loads(self._socket.recv())
            result, ended = None, self._connect()
        return None

    def _run(self, number: int, name: str, payload: bytes) -> tuple[bytes, str]:
        """Run a function; return its pickled result or error, and the traceback of an error."""
        value, error, details = None, None, ""
        try:
            fn, args, kwargs = self._unpack(payload)
            self._strategy.pull()
            once = self._strategy.store.once(number)
            with once, mark(f"function {number}"), _check_buffers(self._strategy):
                value = fn(*args, **kwargs)
        except Exception as raised:
            error, location = raised, f"{name} on worker {self._worker.rank}"
            details = f"{location} raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        return _pack_outcome(value, error, name, details), details

    def _unpack(self, payload: bytes) -> Any:
        reader = pickle.Unpickler(io.BytesIO(payload))
        reader.persistent_load = self._resolve  # type: ignore[method-assign]
        return reader.load()

    def _resolve(self, name: tuple[str, Any]) -> Any:
        """Return this worker's object for a name from :class:`_Pickler`."""
        kind, key = name
        if kind == "strategy":
            return self._strategy
        return self._strategy._variables[key] if kind == "variable" else self._iterator(key)

    def _iterator(self, key: tuple[int, int]) -> Any:
        dataset, _ = key
        if dataset not in self._datasets:
            self._datasets[dataset] = self._unpack(self._factories[dataset])()
        if key not in self._iterators:
            self._iterators[key] = iter(self._datasets[dataset])
        return self._iterators[key]

    def _connect(self) -> bool:
        """Connect to a new address of the coordinator; return whether the coordinator has ended."""
        note = self._strategy.store.note(_NOTE)
        address = self._node.route(note or _endpoint(self._node))
        if note != _ENDED and address != self._address:
            if self._socket is not None:
                self._socket.close(linger=0)
            self._address = address
            self._socket = open_socket(zmq.Context.instance(), zmq.DEALER, self._node.keys)
            self._socket.connect(address)
        return note == _ENDED


def _endpoint(node: kvstore.Node) -> str:
    """Return worker 0's endpoint for workers on its host."""
    return f"ipc://{node.folder}/{node.run}-coordinator"


@contextmanager
def _check_buffers(strategy: ParameterServerStrategy) -> Iterator[None]:
    """Raise StrategyError if a scheduled function changes a floating-point buffer."""
    buffers = [v for v in strategy._variables if not isinstance(v, nn.Parameter)]
    values = [(b, b.nan_to_num()) for b in buffers if b.is_floating_point()]
    yield
    for buffer, previous in values:
        if not buffer.nan_to_num().equal(previous):
            raise StrategyError(
                f"A scheduled function changed the buffer {owner_of(buffer)[1]}, but a "  # type: ignore[index]
                "ClusterCoordinator does not share buffers between workers. Put the layer into "
                "eval() mode, use nn.GroupNorm or nn.LayerNorm, or return the values from the "
                "function."
            )


# -- pickling --------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value, except for objects that each worker has."""

    def __init__(self, file: io.BytesIO, strategy: ParameterServerStrategy) -> None:
        super().__init__(file)
        self._strategy = strategy
        self._variables = {id(v): n for n, v in enumerate(strategy._variables)}

    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        """Return the name of an object that is not sent."""
        if obj is self._strategy:
            return "strategy", None
        if isinstance(obj, Tensor) and id(obj) in self._variables:
            return "variable", self._variables[id(obj)]
        return ("iterator", obj.key) if isinstance(obj, PerWorkerIterator) else None


def _pack(obj: Any, strategy: ParameterServerStrategy) -> bytes:
    file = io.BytesIO()
    _Pickler(file, strategy).dump(obj)
    return file.getvalue()


def _pack_outcome(value: Any, error: Exception | None, name: str, details: str) -> bytes:
    """Pickle a result or an error; if that fails, pickle an error that explains it."""
    try:
        result: bytes = cloudpickle.dumps((value, error))
        pickle.loads(result)
    except Exception as failure:
        unsendable = (
            f"{name} returned a value of type {type(value).__name__}, which cannot be pickled and "
            "unpickled: "
            f"{type(failure).__name__}: {failure}. Return tensors, numbers or other plain values."
        )
        result = pickle.dumps((None, StrategyError(details or unsendable)))
    return result


def _name(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the name of a scheduled function, or of the replica function of ``strategy.run``.

    >>> _name(len, ()), _name(ParameterServerStrategy().run, (abs, (1,)))
    ('len', 'abs')
    """
    if isinstance(getattr(fn, "__self__", None), ParameterServerStrategy) and args:
        fn = args[0]
    return getattr(fn, "__name__", type(fn).__name__)
