"""Functions that harm their rank's process, each with the outcome that the user must see.

Rank 1 runs the function while rank 0 runs ``other``, if any, and waits at a barrier. The decorator
states the outcome: a result, an error on rank 1, or the end of its process.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import ctypes
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import distkit as dk


@dataclass(frozen=True)
class Misuse:
    """A function for rank 1, and the expected outcome.

    Args:
        fn: the function that rank 1 runs.
        ending: pattern for the first line of the run's error; "" if there is none.
        value: the result of rank 1 if there is no error.
        other: a function that rank 0 runs meanwhile.
        endless: whether only ``interrupt()`` ends the run.
        isolated: whether rank 1 can no longer communicate after the function.
    """

    fn: Callable[[], Any]
    ending: str = ""
    value: Any = None
    other: Callable[[], Any] | None = None
    endless: bool = False
    isolated: bool = False

    def program(self) -> Any:
        """Run the function on rank 1 and ``other`` on rank 0."""
        fn = self.fn if dist.get_rank() == 1 else self.other
        value = fn() if fn is not None else None
        if not self.isolated and dist.is_initialized():
            dist.barrier()
        return value


#: The catalog, by name.
ALL: dict[str, Misuse] = {}

Function = Callable[[], Any]


def ends(**outcome: Any) -> Callable[[Function], Function]:
    """Add a function to the catalog, with its outcome."""

    def add(fn: Function) -> Function:
        ALL[fn.__name__] = Misuse(fn, **outcome)
        return fn

    return add


def returns(value: Any = None, **outcome: Any) -> Callable[[Function], Function]:
    """Add a function that returns this value."""
    return ends(value=value, **outcome)


def raises(text: str, **outcome: Any) -> Callable[[Function], Function]:
    """Add a function that raises this error; its line must be reported."""
    return ends(ending=f"rank 1 raised {text}.* at .*catalog.py:", **outcome)


def dies(how: str, **outcome: Any) -> Callable[[Function], Function]:
    """Add a function that ends the process in this way."""
    return ends(ending=rf"the process of rank 1 exited .*\({how}", **outcome)


# -- process exits ---------------------------------------------------------------


@ends(ending=r"rank 1 called sys.exit\(3\) at .*catalog.py:")
def exits() -> None:
    sys.exit(3)


@dies("exit status 7")
def exits_immediately() -> None:
    os._exit(7)


@dies("signal SIGABRT")
def aborts() -> None:
    os.abort()


@dies("signal SIGSEGV")
def segfaults() -> None:
    ctypes.string_at(0)


@dies("signal SIGKILL")
def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dies("signal SIGTERM")
def terminates_itself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@dies("signal SIGUSR1")
def sends_itself_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@ends(ending=r"rank 1 raised KeyboardInterrupt: signal SIGINT at .*catalog.py:")
def interrupts_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


@dies("signal SIGKILL")
def kills_its_process_group() -> None:
    os.killpg(0, signal.SIGKILL)


@dies("signal SIGALRM")
def sets_a_fatal_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(10)


@dies("signal SIGXCPU")
def exceeds_its_cpu_limit() -> None:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1, resource.RLIM_INFINITY))
    while True:
        pass


@dies("exit status 1")
def exits_from_faulthandler() -> None:
    faulthandler.dump_traceback_later(0.05, exit=True)
    time.sleep(10)


@dies("signal SIGSEGV")
def overflows_the_c_stack() -> None:
    sys.setrecursionlimit(10**9)

    def deeper(x: Any) -> Any:
        return max([x], key=deeper)

    deeper(0)


@ends(ending="^program was stopped", endless=True)
def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# -- exceptions -------------------------------------------------------------------------


def raise_it() -> None:
    raise ValueError("bad batch")


@raises("ValueError: bad batch")
def raises_an_error() -> None:
    raise_it()


def swallow_exceptions() -> None:
    while True:
        try:
            dist.recv(torch.zeros(1), src=1)
        except BaseException:
            time.sleep(0.01)


@raises("ValueError: bad batch", other=swallow_exceptions)
def raises_while_other_rank_swallows_the_release() -> None:
    raise_it()


@raises("ValueError: bad batch", other=lambda: ctypes.PyDLL(None).sleep(30))
def raises_while_other_rank_is_in_c_with_the_gil() -> None:
    raise_it()


@raises("ValueError: bad batch", other=lambda: ctypes.CDLL(None).sleep(30))
def raises_while_other_rank_is_in_c() -> None:
    raise_it()


@raises("ValueError: bad batch", other=lambda: torch.linalg.svd(torch.rand(4000, 4000)))
def raises_while_other_rank_is_in_a_long_operator() -> None:
    raise_it()


@raises("ValueError: bad batch", other=lambda: re.match("(a+)+$", "a" * 60 + "b"))
def raises_while_other_rank_is_in_a_regular_expression() -> None:
    raise_it()


def exit_when_released() -> None:
    try:
        dist.recv(torch.zeros(1), src=1)
    finally:
        os._exit(9)


@raises("ValueError: bad batch", other=exit_when_released)
def raises_and_other_rank_dies_on_release() -> None:
    raise_it()


@raises("ValueError: bad batch")
def raises_and_then_waits() -> None:
    try:
        raise_it()
    finally:
        dist.recv(torch.zeros(1), src=0)


@raises("RecursionError: maximum recursion depth")
def recurses_forever() -> None:
    recurses_forever()


@raises("RecursionError")
def recurses_through_communication() -> None:
    dist.get_rank()
    dist.is_initialized()
    recurses_through_communication()


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@raises("StrRaises: ")
def raises_error_whose_str_raises() -> None:
    raise StrRaises


class StrRecurses(Exception):
    def __str__(self) -> str:
        return str(self)


@raises("StrRecurses: ")
def raises_error_whose_str_recurses() -> None:
    raise StrRecurses


class StrExits(Exception):
    def __str__(self) -> str:
        sys.exit(1)


@raises("StrExits")
def raises_error_whose_str_exits() -> None:
    raise StrExits


class StrIsNone(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


@raises("StrIsNone")
def raises_error_whose_str_is_none() -> None:
    raise StrIsNone


class StrSubclass(str):
    def __reduce__(self) -> Any:
        return raise_it, ()


class StrIsSubclass(Exception):
    def __str__(self) -> str:
        return StrSubclass("own text")


@raises("StrIsSubclass: own text")
def raises_error_whose_str_cannot_be_pickled() -> None:
    raise StrIsSubclass


@raises("ValueError: bad batch")
def raises_from_error_whose_str_raises() -> None:
    try:
        raise StrRaises
    except StrRaises as cause:
        raise ValueError("bad batch") from cause


class AttributesRaise(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


@raises("AttributesRaise: bad batch")
def raises_error_whose_attributes_raise() -> None:
    raise AttributesRaise("bad batch")


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


@raises("TwoArguments: 3: bad batch")
def raises_error_that_cannot_be_unpickled() -> None:
    raise TwoArguments(3, "bad batch")


@returns(ending=r"rank 1 returned an object of type TwoArguments that cannot be unpickled")
def returns_an_exception_that_cannot_be_unpickled() -> Any:
    return TwoArguments(3, "bad batch")


if sys.version_info >= (3, 11):

    @raises("ExceptionGroup: several")
    def raises_a_group() -> None:
        raise ExceptionGroup("several", [ValueError("bad batch"), StrRaises()])  # noqa: F821


@raises("ValueError: bad batch")
def raises_with_notes() -> None:
    error = ValueError("bad batch")
    vars(error)["__notes__"] = ["of rank 1", 3, StrRaises()]
    raise error


@raises("ValueError: bad batch")
def raises_with_circular_causes() -> None:
    one, two = ValueError("bad batch"), KeyError("other")
    one.__cause__, two.__cause__ = two, one
    one.__context__, two.__context__ = two, one
    raise one


@raises("KeyboardInterrupt")
def raises_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


@raises("GeneratorExit")
def raises_generator_exit() -> None:
    raise GeneratorExit


@raises("StopIteration")
def raises_stop_iteration() -> None:
    next(iter([]))


@raises("CancelledError")
def raises_cancelled() -> None:
    raise asyncio.CancelledError


@raises("BaseException: bad batch")
def raises_base_exception() -> None:
    raise BaseException("bad batch")


@raises("ValueError: x{187}…")
def raises_with_a_huge_message() -> None:
    raise ValueError("x" * 50_000_000)


@raises("ValueError: .*bad")
def raises_with_control_characters() -> None:
    raise ValueError("\x1b[2J\x00\udcffbad\r")


@raises("MemoryError")
def runs_out_of_memory() -> None:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, hard))
    _ = bytearray(1_000_000_000)


@raises("RuntimeError: .*alloc")
def runs_out_of_memory_in_torch() -> None:
    torch.empty(1 << 60)


@raises("SyntaxError: ")
def raises_a_syntax_error() -> None:
    exec("def f(:")


@raises("ModuleNotFoundError: No module named 'nowhere'")
def imports_a_missing_module() -> None:
    __import__("nowhere")


@raises("RuntimeError: .*mat1 and mat2")
def raises_in_torch() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


@raises("RuntimeError: bad gradient")
def raises_in_backward() -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise RuntimeError("bad gradient")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()


@raises("ValueError: bad batch")
def raises_in_a_thread_pool() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pool.submit(raise_it).result()


class DeletionHangs:
    def __del__(self) -> None:
        while True:
            with suppress(BaseException):
                time.sleep(1)


@raises("ValueError: bad batch")
def raises_and_hangs_in_del() -> None:
    _ = DeletionHangs()
    raise_it()


# -- results ----------------------------------------------------------------------------


@returns(
    ending="rank 1: the function returned an object of type generator that cannot be sent back"
)
def returns_a_generator() -> Iterator[int]:
    yield 1


@returns(ending="rank 1: the function returned an object of type lock that cannot be sent back")
def returns_a_lock() -> Any:
    return threading.Lock()


class PicklingExits:
    def __reduce__(self) -> Any:
        sys.exit(4)


@returns(
    ending="rank 1: the function returned an object of type PicklingExits that cannot be sent back"
)
def returns_value_that_exits_when_pickled() -> Any:
    return PicklingExits()


class UnpicklingRaises:
    def __reduce__(self) -> Any:
        return raise_it, ()


@returns(
    ending="rank 1 returned an object of type UnpicklingRaises "
    "that cannot be unpickled .*ValueError"
)
def returns_value_that_raises_when_unpickled() -> Any:
    return UnpicklingRaises()


class UnpicklingExits:
    def __reduce__(self) -> Any:
        return sys.exit, (4,)


@returns(
    ending="rank 1 returned an object of type UnpicklingExits that cannot be unpickled .*SystemExit"
)
def returns_value_that_exits_when_unpickled() -> Any:
    return UnpicklingExits()


@returns(
    ending="rank 1: the function returned an object of type list "
    "that cannot be sent back .*recursion"
)
def returns_a_deep_list() -> Any:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@returns(50_000_000)
def makes_a_large_array() -> Any:
    return len(torch.ones(50_000_000).numpy())


@returns("x" * 20_000_000)
def returns_a_long_string() -> Any:
    return "x" * 20_000_000


@returns("a circle")
def returns_from_a_circular_list() -> Any:
    circle: list[Any] = ["a circle"]
    circle.append(circle)
    return circle[0]


# -- threads and locks --------------------------------------------------------------------


@returns()
def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


@returns()
def leaves_threads_that_compute() -> None:
    def compute() -> None:
        while True:
            sum(range(1000))

    for _ in range(3):
        threading.Thread(target=compute, daemon=True).start()


@returns()
def leaves_a_thread_that_prints() -> None:
    def print_forever() -> None:
        while True:
            print("still here")
            time.sleep(0.1)

    threading.Thread(target=print_forever, daemon=True).start()


@returns()
def raises_in_a_thread() -> None:
    thread = threading.Thread(target=raise_it)
    thread.start()
    thread.join()


@ends(ending="^program was stopped", endless=True)
def waits_for_its_own_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@ends(ending="^program was stopped", endless=True)
def waits_for_an_empty_queue() -> None:
    queue.Queue[int]().get()


@ends(ending="^program was stopped", endless=True)
def computes_forever() -> None:
    while True:
        pass


@ends(ending="^program was stopped", endless=True)
def computes_forever_in_c() -> None:
    sum(range(10**15))


@ends(ending="^program was stopped", endless=True)
def swallows_the_interrupt() -> None:
    while True:
        with suppress(BaseException):
            time.sleep(1)


@returns([0, 1, 2])
def runs_coroutines() -> Any:
    async def count() -> list[int]:
        await asyncio.sleep(0.01)
        return [0, 1, 2]

    return asyncio.run(count())


# -- signals and timers -------------------------------------------------------------------


@returns()
def ignores_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


@ends(ending="^program was stopped", endless=True)
def ignores_signals_and_waits() -> None:
    ignores_signals()
    time.sleep(1000)


# -- descriptors and streams --------------------------------------------------------------


@returns()
def closes_the_standard_descriptors() -> None:
    for number in range(3):
        os.close(number)


@returns()
def closes_its_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


@returns()
def replaces_its_streams() -> None:
    sys.stdout = io.StringIO()
    sys.stderr = sys.stdin = None
    sys.__stdout__ = None  # type: ignore[misc]


@dies("signal SIGABRT|it closed descriptors")
def closes_all_descriptors() -> None:
    os.closerange(3, 1 << 16)
    time.sleep(10)


@dies("signal SIGABRT|it closed descriptors")
def closes_all_descriptors_and_returns() -> None:
    os.closerange(0, 1 << 16)


@returns()
def opens_many_files() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    held = []
    with suppress(OSError):
        for _ in range(limit):
            held.append(open(os.devnull))


@returns()
def prints_many_lines() -> None:
    for number in range(20_000):
        print(number)


@returns()
def prints_a_long_line() -> None:
    print("x" * 5_000_000)


@returns()
def prints_control_characters_and_bytes() -> None:
    print("\x1b[31m\x1b[2J\udcff\x00\r\b", end="")
    sys.stdout.buffer.write(b"\xff\xfe")
    print(sys.stdout.fileno() >= 0, sys.stdout.encoding, file=sys.stderr)


@raises("(EOFError|.*input)")
def asks_for_input() -> None:
    input("name? ")


# -- settings of the process --------------------------------------------------------------


@returns()
def removes_its_working_directory() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)


@returns()
def lowers_its_limits() -> None:
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(which, (4, resource.getrlimit(which)[1]))


@returns()
def changes_paths() -> None:
    sys.path.clear()
    sys.argv[:] = ["other"]
    sys.meta_path.clear()
    sys.path_hooks.clear()


@returns()
def changes_hooks() -> None:
    hook: Any = lambda *_: os._exit(1)  # noqa: E731
    sys.excepthook = sys.displayhook = sys.unraisablehook = threading.excepthook = hook


@returns(isolated=True)
def leaves_a_tracer() -> None:
    sys.settrace(lambda *_: time.sleep(0.0001))


@returns()
def leaves_a_profiler() -> None:
    sys.setprofile(lambda *_: time.sleep(0.0001))


@returns()
def changes_the_interpreter() -> None:
    sys.setrecursionlimit(300)
    sys.setswitchinterval(10)
    gc.disable()
    gc.set_threshold(1)
    gc.set_debug(gc.DEBUG_STATS)
    sys.set_int_max_str_digits(640)


@returns()
def turns_warnings_into_errors() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.showwarning = lambda *_, **__: raise_it()


@returns()
def changes_torch() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(7)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_printoptions(precision=1)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")


@returns()
def sets_the_default_socket_timeout() -> None:
    socket.setdefaulttimeout(0.001)


@dies("exit status 1", isolated=True)
def replaces_builtins() -> None:
    builtins.print = builtins.open = builtins.__import__ = None  # type: ignore[assignment]
    builtins.len = builtins.isinstance = None  # type: ignore[assignment]


@dies("it closed descriptors that distkit needs", isolated=True)
def breaks_the_channel_to_the_kernel() -> None:
    from distkit.cluster.processes import channel

    channel._HEAD = None  # type: ignore[assignment]


@returns(isolated=True)
def removes_modules() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("pickle", "torch", "distkit", "threading", "json"):
            del sys.modules[name]


@returns(isolated=True)
def removes_all_modules() -> None:
    sys.modules.clear()


@returns(isolated=True)
def sets_modules_to_none() -> None:
    for name in ("pickle", "queue", "socket"):
        sys.modules[name] = None  # type: ignore[assignment]


@dies("exit status 1", isolated=True)
def replaces_module_functions() -> None:
    time.sleep = time.monotonic = raise_it  # type: ignore[assignment]
    os.getpid = json.dumps = raise_it  # type: ignore[assignment]


@returns(isolated=True)
def replaces_torch_functions() -> None:
    nothing: Any = lambda *_, **__: None  # noqa: E731
    dist.all_reduce = dist.barrier = nothing
    dist.Work.wait = nothing  # type: ignore[method-assign]


def destroy_the_group() -> None:
    dist.barrier()
    dist.destroy_process_group()


@returns(other=destroy_the_group)
def destroys_its_group() -> None:
    destroy_the_group()


@raises("ValueError: trying to initialize the default process group twice")
def initializes_the_group_twice() -> None:
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


# -- child processes ----------------------------------------------------------------------


@returns()
def forks_a_child_that_ends() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@returns("parent", isolated=True)
def forks_a_child_that_returns() -> Any:
    pid = os.fork()
    if pid == 0:
        return "child"
    os.waitpid(pid, 0)
    return "parent"


@returns("parent")
def forks_a_child_that_raises() -> Any:
    pid = os.fork()
    if pid == 0:
        raise_it()
    os.waitpid(pid, 0)
    return "parent"


@returns()
def forks_a_child_that_keeps_running() -> None:
    if os.fork() == 0:
        time.sleep(1000)


@returns()
def starts_a_process_that_keeps_running() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)


@returns([0, 1, 2])
def starts_a_pool_of_processes() -> Any:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [0, -1, -2])


@returns(10)
def loads_data_with_workers() -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(20))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)
    return sum(1 for _ in loader)


@returns("hello\n")
def runs_a_command() -> Any:
    return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout


@raises("CalledProcessError")
def runs_a_command_that_fails() -> None:
    subprocess.run(["false"], check=True)


@returns(4)
def starts_ranks() -> Any:
    return sum(dk.run_ranks(lambda: 2, 2).results)
