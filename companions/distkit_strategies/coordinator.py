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
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import zmq
from torch import Tensor
from torch.utils import _pytree as pytree

from distkit import kvstore
from distkit.errors import StrategyError
from distkit.kvstore.transport.sockets import context, listen_on, open_socket
from distkit.recording.recorder import mark
from distkit.recording.trouble import Dropped
from distkit_strategies.function_queue import FunctionQueue, Worker
from distkit_strategies.parameter_server import ParameterServerStrategy

#: A worker without a function says again that it is ready after so long [ms]: the coordinator may
#: be another process than before, or have ended.
_AGAIN = 200

#: The note that tells where worker 0 listens; and what it says, as worker 0 does, at the end.
_NOTE, _OVER = "coordinator", "over"

#: So many functions may wait for a worker before ``schedule`` does.
QUEUE = 256


class RemoteValue:
    """The result of a scheduled function, once it has run."""

    def __init__(self, coordinator: ClusterCoordinator, function: int) -> None:
        self._coordinator, self._function = coordinator, function
        self._done, self._value = False, None
        self._error: BaseException | None = None

    def fetch(self) -> Any:
        """Wait for the result and return it.

        Raises:
            StrategyError: the function was cancelled.
            Exception: what the function raised.
        """
        self._coordinator._wait(lambda: self._done)
        if self._error is not None:
            raise self._error
        return self._value

    get = fetch

    def _settle(self, value: Any, error: BaseException | None) -> None:
        self._done, self._value, self._error = True, value, error

    def __reduce__(self) -> Any:
        """As an argument of another function it is the value."""
        return _itself, (self.fetch(),)


class PerWorkerDataset:
    """A dataset that each worker makes for itself: iterators of it are arguments of functions."""

    def __init__(self, dataset_fn: Callable[[], Any], number: int) -> None:
        self._make, self._number = dataset_fn, number
        self._iterators = 0

    def __iter__(self) -> PerWorkerIterator:
        self._iterators += 1
        return PerWorkerIterator(self._number, self._iterators)


class PerWorkerIterator:
    """An iterator over each worker's own dataset, for the arguments of scheduled functions."""

    def __init__(self, dataset: int, number: int) -> None:
        self.dataset, self.number = dataset, number

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "next() of a per-worker iterator on the coordinator: each worker has its own batches. "
            "Give it to a function: coordinator.schedule(step, args=(iterator,))."
        )


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
            _serve(strategy, node)
        self._queue, self._store = FunctionQueue(), store
        self._payloads: dict[int, bytes] = {}
        self._called: dict[int, str] = {}  # what the functions are called
        self._values: dict[int, RemoteValue] = {}
        self._datasets: list[PerWorkerDataset] = []
        self._names: dict[Worker, bytes] = {}  # of the connection of each worker's process
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
        self._wait(lambda: len(self._queue.pending) < QUEUE)
        self._raise()
        payload = _pack((fn, tuple(args), dict(kwargs or {})), self.strategy)
        function = self._queue.schedule()
        self._payloads[function] = payload
        self._called[function] = f"function {function}, {_name(fn, args)},"
        self._values[function] = value = RemoteValue(self, function)
        self._assign()
        return value

    def join(self) -> None:
        """Wait until all scheduled functions are over; then this worker's variables are current.

        Raises:
            Exception: one of them has raised it; those that waited for a worker are cancelled.
        """
        self._finish()
        self.strategy.pull()

    def _finish(self) -> None:
        self._wait(lambda: not self._queue.unfinished)
        self._raise()

    def done(self) -> bool:
        """True if all scheduled functions are over.

        Raises:
            Exception: as :meth:`join`.
        """
        self._receive(0)
        self._raise()
        return not self._queue.unfinished

    def fetch(self, values: Any) -> Any:
        """The results of functions: each :class:`RemoteValue` in a structure becomes its value.

        Raises:
            Exception: as :meth:`RemoteValue.fetch`.
        """
        return pytree.tree_map_only(RemoteValue, RemoteValue.fetch, values)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """A dataset that each worker makes by calling ``dataset_fn()``, when it first needs it.

        Who takes a dead worker's place makes it anew, and begins at its beginning.

        Args:
            dataset_fn: returns an iterable, such as ``strategy.distribute_dataset(data, 128)``.
        """
        self._datasets.append(PerWorkerDataset(dataset_fn, len(self._datasets)))
        return self._datasets[-1]

    # -- the workers' words ---------------------------------------------------------------------

    def _wait(self, over: Callable[[], bool]) -> None:
        while not over():
            self._receive(None)

    def _receive(self, timeout: int | None) -> None:
        """Take what workers say; wait for something at most so long [ms]."""
        while self._socket.poll(timeout):
            name, said = self._socket.recv_multipart()
            worker, kind, what, payload = pickle.loads(said)
            if kind == "dataset":
                self._give(name, what)
            elif kind == "finished":
                self._finished(worker, what, payload)
            else:
                self._queue.ready(worker)
            self._names[worker] = name
            timeout = 0
        self._assign()

    def _give(self, name: bytes, dataset: int) -> None:
        """Tell a worker how a dataset is made: not before it exists, in worker 0's second life."""
        if dataset < len(self._datasets):
            self._say(name, "dataset", _pack(self._datasets[dataset]._make, self.strategy))

    def _finished(self, worker: Worker, function: int, payload: bytes) -> None:
        if not self._queue.finished(worker, function):
            return
        del self._payloads[function]
        value, error = self._result(payload, self._called.pop(function))
        self._values.pop(function)._settle(value, error)
        if error is not None and self._error is None:
            self._error = error
            self._cancel(f"function {function} raised {type(error).__name__}: {error}")

    def _result(self, payload: bytes, called: str) -> tuple[Any, BaseException | None]:
        """What a worker has sent: a value, or an error."""
        try:
            value, error, where = pickle.loads(payload)
        except Exception as why:
            return None, StrategyError(
                f"The result of {called} cannot be unpickled on worker 0: {type(why).__name__}: "
                f"{why}. Return tensors, numbers, or other plain values."
            )
        if error is not None:
            error.__cause__ = StrategyError(where)
        return value, error

    def _cancel(self, why: str) -> None:
        for function in self._queue.cancel():
            del self._payloads[function], self._called[function]
            told = StrategyError(f"function {function} was cancelled: {why}")
            self._values.pop(function)._settle(None, told)

    def _assign(self) -> None:
        for worker, function in self._queue.assign():
            what = function, self._queue.floor, self._payloads[function]
            self._say(self._names[worker], "ready", what)

    def _say(self, name: bytes, kind: str, what: Any = None) -> None:
        """Answer a worker's word of this kind."""
        self._socket.send_multipart([name, pickle.dumps((kind, what))])

    def _raise(self) -> None:
        """Tell of an error, once, when no function is running any more."""
        if self._error is not None:
            self._wait(lambda: not self._queue.unfinished)
            error, self._error = self._error, None
            raise error

    def _close(self) -> None:
        """Worker 0's function has returned: when all is over, the others leave theirs."""
        try:
            self._finish()
        finally:
            for name in self._names.values():
                self._say(name, _OVER)
            self.strategy.coordinated = False
            self._socket.close(linger=_AGAIN)
            self._store.note(_NOTE, _OVER)

    def __reduce__(self) -> Any:
        raise StrategyError(
            "A scheduled function uses the coordinator, which stays on worker 0: schedule there."
        )


# -- a worker ---------------------------------------------------------------------------------


class _Serving:
    """A worker's end of the line: runs functions until the coordinator has ended.

    Raises:
        Dropped: it has.
    """

    def __init__(self, strategy: ParameterServerStrategy, node: kvstore.Node) -> None:
        self._strategy, self._me = strategy, Worker(node.index, node.life)
        self._node, self._over = node, False
        self._connect(_endpoint(node))
        if node.address:
            self._look()
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[tuple[int, int], Any] = {}
        self._runs = 0

    def serve(self) -> None:
        """Run what comes."""
        while True:
            function, floor, payload = self._ask("ready")
            result = self._run(function, floor, payload)
            self._runs += 1
            self._say("finished", function, result)

    def _run(self, function: int, floor: int, payload: bytes) -> bytes:
        where = f"function {function} on worker {self._me.rank}"
        try:
            fn, args, kwargs = self._unpack(payload)
            where += f" ({_name(fn, args)})"
            self._strategy.pull()
            with self._strategy.store.once(function, floor), mark(f"function {function}"):
                result = self._strategy.keeping_buffers(fn, *args, **kwargs)
            return _packed(result, f"function {function}, {_name(fn, args)},")
        except Exception as error:
            return _told(error, where)

    def _unpack(self, payload: bytes) -> Any:
        reader = pickle.Unpickler(io.BytesIO(payload))
        reader.persistent_load = self._own  # type: ignore[method-assign]
        return reader.load()

    def _own(self, name: tuple[Any, ...]) -> Any:
        """What the coordinator means, here."""
        match name:
            case ("strategy",):
                return self._strategy
            case ("variable", n):
                return self._strategy._variables[n]
            case ("iterator", dataset, number):
                return self._iterator(dataset, number)
        raise StrategyError(f"a worker has no {name}")

    def _iterator(self, dataset: int, number: int) -> Any:
        if dataset not in self._datasets:
            self._datasets[dataset] = self._unpack(self._ask("dataset", dataset))()
        if (dataset, number) not in self._iterators:
            self._iterators[dataset, number] = iter(self._datasets[dataset])
        return self._iterators[dataset, number]

    def _say(self, kind: str, what: Any, payload: bytes = b"") -> None:
        self._socket.send(pickle.dumps((self._me, kind, what, payload)))

    def _connect(self, way: str) -> None:
        self._way = way
        self._socket = open_socket(context(), zmq.DEALER, self._node.keys)
        self._socket.connect(way)

    def _look(self) -> None:
        """See where the coordinator listens by now, and whether it has ended."""
        said = self._strategy.store.note(_NOTE)
        self._over = said == _OVER
        if said and not self._over and (way := self._node.way(said)) != self._way:
            self._socket.close(linger=0)
            self._connect(way)

    def _ask(self, kind: str, what: Any = None) -> Any:
        """The coordinator's answer; it is asked again until it has one."""
        answers, answer = "", None
        while answers != kind:
            self._say(kind, what)
            if self._socket.poll(_AGAIN):
                answers, answer = pickle.loads(self._socket.recv())
            else:
                self._look()
            if answers == _OVER or self._over:
                self._socket.close(linger=0)
                raise Dropped(f"ran {self._runs} scheduled functions")
        return answer


def _serve(strategy: ParameterServerStrategy, node: kvstore.Node) -> None:
    try:
        _Serving(strategy, node).serve()
    finally:
        strategy.coordinated = False  # this run is over


def _endpoint(node: kvstore.Node) -> str:
    """Where worker 0 listens in this run, for workers of its host."""
    return f"ipc://{node.folder}/co{node.run}"


# -- what travels -----------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value, but for what each worker has itself."""

    def __init__(self, file: io.BytesIO, strategy: ParameterServerStrategy) -> None:
        super().__init__(file)
        self._strategy = strategy
        self._variables = {id(v): n for n, v in enumerate(strategy._variables)}

    def persistent_id(self, it: Any) -> tuple[Any, ...] | None:
        """The name of what is not to travel."""
        if it is self._strategy:
            return ("strategy",)
        if isinstance(it, Tensor) and id(it) in self._variables:
            return "variable", self._variables[id(it)]
        if isinstance(it, PerWorkerIterator):
            return "iterator", it.dataset, it.number
        return None


def _pack(it: Any, strategy: ParameterServerStrategy) -> bytes:
    file = io.BytesIO()
    _Pickler(file, strategy).dump(it)
    return file.getvalue()


def _packed(result: Any, called: str) -> bytes:
    """A function's result.

    Raises:
        StrategyError: it cannot be pickled.
    """
    try:
        done: bytes = cloudpickle.dumps((result, None, ""))
        return done
    except Exception as why:
        raise StrategyError(
            f"The result of {called} a {type(result).__name__}, cannot be pickled: "
            f"{type(why).__name__}: {why}. Return tensors, numbers, or other plain values."
        ) from why


def _name(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """What a scheduled function is called: of ``strategy.run``, the replica function that it runs.

    >>> _name(len, ()), _name(ParameterServerStrategy().run, (abs, (1,)))
    ('len', 'abs')
    """
    if isinstance(getattr(fn, "__self__", None), ParameterServerStrategy) and args:
        fn = args[0]
    return getattr(fn, "__name__", type(fn).__name__)


def _told(error: Exception, where: str) -> bytes:
    """An error as worker 0 is to raise it, and where it comes from."""
    text = f"{where} raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
    try:
        told: bytes = cloudpickle.dumps((None, error, text))
        pickle.loads(told)
    except Exception:  # it cannot travel
        told = pickle.dumps((None, StrategyError(text), text))
    return told


def _itself(it: Any) -> Any:
    return it
