"""Settings that a function may change in its rank's process, put back when it is over.

A function is a program: under torchrun its process would end with it. So what it set ends with it
here, too: folder, environment, torch's defaults and the like. A ``%%ranks`` cell is a cell: such
things stay for those after it, as in any notebook. What the rank itself stands on (signal handlers,
descriptors, limits, modules and their functions) is put back after both. Variables, modules and
files always stay. What cannot be put back costs the rank its process.
"""

from __future__ import annotations

import asyncio
import builtins
import decimal
import faulthandler
import fcntl
import gc
import locale
import logging
import multiprocessing
import operator
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from distkit.errors import OWN
from distkit.recording.open_buffers import OpenBuffers
from distkit.recording.recorder import is_users

_BUILTINS = vars(builtins)


@dataclass(frozen=True)
class Setting:
    """One thing that code can change: ``read`` it, ``write`` it back; a cell's ``stays``.

    ``same`` tells whether it is as before, where comparing what is read does not.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    stays: bool = True
    same: Callable[[Any], bool] | None = None


class Settings:
    """The values of all settings when this was made."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._builtins = dict(_BUILTINS)
        self._worn: list[str] | None = None
        for name, setting in ALL.items():
            with suppress(Exception):  # a cell has removed its folder, say: nothing to go back to
                self._before[name] = setting.read()

    def restore(self, *, cell: bool) -> list[str]:
        """Put back what has changed, but for what a ``cell`` may keep; name what cannot be.

        Once it has come to its end, it is not done again.
        """
        if self._worn is None:
            _BUILTINS.update(self._builtins)  # nothing works without them, not even what follows
            faulthandler.cancel_dump_traceback_later()
            self._worn = [
                name
                for name, before in self._before.items()
                if not (cell and ALL[name].stays) and not _put_back(ALL[name], before)
            ]
        return self._worn


def _put_back(setting: Setting, before: Any) -> bool:
    """True if it is as before, if need be because of us."""
    if _is_same(setting, before):
        return True
    with suppress(Exception):  # not allowed, or impossible by now
        setting.write(before)
    return _is_same(setting, before)


def _is_same(setting: Setting, before: Any) -> bool:
    try:
        return setting.same(before) if setting.same is not None else setting.read() == before
    except Exception:  # such as the folder that has been removed
        return False


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Let the function have event loops of its own: the engine's is none of its business."""
    loop, policy = asyncio._get_running_loop(), asyncio.get_event_loop_policy()
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        asyncio._set_running_loop(loop)


# -- the process ----------------------------------------------------------------------------

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: Signals whose handlers can be set; that of SIGINT comes and goes with each run.
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT})


def _set_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _mask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _set_limits(before: list[tuple[int, int]]) -> None:
    for which, limits in zip(_LIMITS, before, strict=True):
        if resource.getrlimit(which) != limits:
            resource.setrlimit(which, limits)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _others(before: dict[int, Any]) -> dict[int, Any]:
    """The handlers that are not as before; what torch's DataLoader does for its workers stays."""
    now = _handlers()
    return {
        number: handler
        for number, handler in before.items()
        if now[number] != handler and not (number == signal.SIGCHLD and _is_of_library(now[number]))
    }


def _set_handlers(before: dict[int, Any]) -> None:
    for number, handler in _others(before).items():
        signal.signal(number, handler)


def _wakeup() -> int:
    number = signal.set_wakeup_fd(-1)
    if number != -1:
        signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    return number


def _set_timers(before: list[bool]) -> None:
    for which, armed in zip(_TIMERS, before, strict=True):
        if not armed:
            signal.setitimer(which, 0)


#: Copies of the standard streams are kept from this descriptor on, where nobody looks.
_COPIES = 700


def make_room() -> None:
    """Make the table of descriptors large, here and in processes forked from now on.

    To enlarge it beside threads takes Linux 10 ms and more: it waits for every processor.
    """
    with suppress(OSError):  # fewer are allowed
        fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _COPIES + 3)


class _Standard:
    """The descriptors 0, 1 and 2, and copies of them."""

    def __init__(self) -> None:
        self._copies: list[int] = []

    def read(self) -> list[tuple[int, int] | None]:
        if not self._copies:
            self._copies = [fcntl.fcntl(n, fcntl.F_DUPFD_CLOEXEC, _COPIES) for n in range(3)]
        return [_file(n) for n in range(3)]

    def write(self, before: list[Any]) -> None:
        for number, copy in enumerate(self._copies):
            if _file(number) != before[number]:
                os.dup2(copy, number)


def _file(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_standard = _Standard()

_OF_THE_PROCESS = {
    "its folder": Setting(os.getcwd, os.chdir),
    "its environment": Setting(lambda: dict(os.environ), _set_environment),
    "its umask": Setting(_mask, os.umask),
    "its priority": Setting(
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda n: os.setpriority(os.PRIO_PROCESS, 0, n),
        stays=False,
    ),
    "its limits": Setting(
        lambda: [resource.getrlimit(n) for n in _LIMITS], _set_limits, stays=False
    ),
    "its signal handlers": Setting(
        _handlers, _set_handlers, stays=False, same=lambda before: not _others(before)
    ),
    "its blocked signals": Setting(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        stays=False,
    ),
    "its signals' wakeup": Setting(_wakeup, signal.set_wakeup_fd, stays=False),
    "its timers": Setting(
        lambda: [signal.getitimer(n)[0] > 0 for n in _TIMERS], _set_timers, stays=False
    ),
    "its crash reports": Setting(
        faulthandler.is_enabled,
        lambda before: (faulthandler.enable if before else faulthandler.disable)(),
        stays=False,
    ),
    "its standard streams": Setting(_standard.read, _standard.write, stays=False),
}

if hasattr(os, "sched_setaffinity"):  # Linux
    _OF_THE_PROCESS["its processors"] = Setting(
        lambda: os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus)
    )

# -- Python -----------------------------------------------------------------------------------

_HOOKS = ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
_STREAMS = ("stdin", "__stdin__", "__stdout__", "__stderr__")
_LISTS = ("path", "meta_path", "path_hooks", "argv")


def _of_sys(names: tuple[str, ...], stays: bool = True) -> Setting:
    def write(before: list[Any]) -> None:
        for name, value in zip(names, before, strict=True):
            setattr(sys, name, value)

    return Setting(lambda: [getattr(sys, name, None) for name in names], write, stays)


def _set_lists(before: list[list[Any]]) -> None:
    for name, value in zip(_LISTS, before, strict=True):
        getattr(sys, name)[:] = value


def _set_warnings(before: tuple[list[Any], Any]) -> None:
    warnings.resetwarnings()
    warnings.filters.extend(before[0])  # type: ignore[attr-defined]
    warnings.showwarning = before[1]


def _set_log(before: tuple[int, list[Any]]) -> None:
    logging.root.setLevel(before[0])
    logging.root.handlers[:] = before[1]


def _set_collector(before: tuple[bool, tuple[int, int, int], int]) -> None:
    (gc.enable if before[0] else gc.disable)()
    gc.set_threshold(*before[1])
    gc.set_debug(before[2])


def _set_tracing(before: tuple[Any, Any]) -> None:
    sys.settrace(before[0])
    sys.setprofile(before[1])
    threading.settrace(before[0])
    threading.setprofile(before[1])


#: How the processes of multiprocessing start is kept here.
_context: Any = multiprocessing.context._default_context

_OF_PYTHON = {
    "its tracing": Setting(lambda: (sys.gettrace(), sys.getprofile()), _set_tracing, stays=False),
    "its paths": Setting(lambda: [[*getattr(sys, name)] for name in _LISTS], _set_lists),
    "its hooks": _of_sys(_HOOKS),
    "its streams": _of_sys(_STREAMS, stays=False),
    "its threads' hook": Setting(
        lambda: threading.excepthook, lambda hook: setattr(threading, "excepthook", hook)
    ),
    "its locale": Setting(
        lambda: locale.setlocale(locale.LC_ALL), lambda x: locale.setlocale(locale.LC_ALL, x)
    ),
    "its decimals": Setting(
        lambda: decimal.getcontext().__reduce__()[1],
        lambda context: decimal.setcontext(decimal.Context(*context)),
    ),
    "its recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "its switch interval": Setting(sys.getswitchinterval, sys.setswitchinterval),
    "its digits": Setting(  # from Python 3.11 on
        getattr(sys, "get_int_max_str_digits", int), getattr(sys, "set_int_max_str_digits", int)
    ),
    "its garbage collector": Setting(
        lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()), _set_collector
    ),
    "its warnings": Setting(lambda: ([*warnings.filters], warnings.showwarning), _set_warnings),
    "its log": Setting(lambda: (logging.root.level, [*logging.root.handlers]), _set_log),
    "its start method": Setting(
        lambda: _context._actual_context, lambda c: setattr(_context, "_actual_context", c)
    ),
    "its sockets' timeout": Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
}

# -- modules and their functions --------------------------------------------------------------

#: What runs beside the user's code in the same process and cannot do without.
_STOOD_ON = (
    "io",
    "json",
    "linecache",
    "os",
    "pickle",
    "queue",
    "select",
    "selectors",
    "signal",
    "socket",
    "struct",
    "threading",
    "time",
    "traceback",
    "types",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)


@cache
def modules() -> dict[str, ModuleType]:
    """The modules that are there before ranks are forked: a copy of theirs would cost each 4 MB."""
    return dict(sys.modules)


def _modules() -> dict[str, ModuleType]:
    known = modules()
    return known if len(known) == len(sys.modules) else dict(sys.modules)


def _are_there(before: dict[str, Any], now: Mapping[str, Any]) -> bool:
    """True if ``now`` begins with the same names and objects: mostly so, and said in no time."""
    begins_with = all(map(operator.is_, before, now)) and len(before) <= len(now)
    return begins_with and all(map(operator.is_, before.values(), now.values()))


def _gone(before: dict[str, Any]) -> dict[str, Any]:
    """The modules that are not loaded any more, or are others; the user's come and go."""
    if _are_there(before, sys.modules):
        return {}
    return {
        name: module
        for name, module in before.items()
        if name != "__main__" and sys.modules.get(name) is not module and _is_of_library(module)
    }


@cache
def functions() -> list[tuple[Any, dict[str, Any]]]:
    """The modules we stand on, and their contents, read before ranks are forked."""
    holders = [*(sys.modules[name] for name in _STOOD_ON if name in sys.modules), dist.Work]
    return [(holder, dict(vars(holder))) for holder in holders]


def _replaced(before: list[tuple[Any, dict[str, Any]]]) -> list[tuple[Any, str, Any]]:
    """The functions in whose place something of the user's is; what a library puts there stays."""
    return [
        (holder, name, value)
        for holder, values in before
        if not _are_there(values, vars(holder))
        for name, value in values.items()
        if (now := vars(holder).get(name)) is not value
        and issubclass(type(value), _FUNCTIONS)
        and not _is_of_library(now)
    ]


def _set_functions(before: list[tuple[Any, dict[str, Any]]]) -> None:
    for holder, name, value in _replaced(before):
        setattr(holder, name, value)


def _is_of_library(value: Any) -> bool:
    """True if a function or module comes from Python, an installed package or distkit."""
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
    elif isinstance(value, ModuleType):
        file = str(vars(value).get("__file__") or "<frozen>")
    else:
        return False
    return file.startswith(OWN) or not is_users(file)


_OF_MODULES = {
    "its functions": Setting(
        functions, _set_functions, stays=False, same=lambda before: not _replaced(before)
    ),
    "its modules": Setting(
        _modules,
        lambda before: sys.modules.update(_gone(before)),
        stays=False,
        same=lambda before: not _gone(before),
    ),
}

# -- torch and numpy --------------------------------------------------------------------------

_PRECISIONS = torch._tensor_str.PRINT_OPTS


def _device() -> Any:
    """The default device as somebody has set it, None if nobody has."""
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


def _modes() -> tuple[Any, ...]:
    """The modes that ``with`` blocks of torch's have entered and not left: not the recorder's."""
    functions = [mode for mode in function_modes() if not isinstance(mode, OpenBuffers)]
    entered = len(functions) - (_device() is not None), len(dispatch_modes())
    return *entered, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def _set_level(before: int) -> None:
    while forward_ad._current_level > before:
        forward_ad.exit_dual_level()


_OF_TORCH = {
    "its default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "its default device": Setting(_device, torch.set_default_device),
    "its threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "its gradient mode": Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    "its search for anomalies": Setting(
        torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on)
    ),
    "its deterministic algorithms": Setting(
        lambda: {
            "mode": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        },
        lambda before: torch.use_deterministic_algorithms(**before),
    ),
    "its matmul precision": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "its printing of tensors": Setting(
        lambda: asdict(_PRECISIONS), lambda before: vars(_PRECISIONS).update(before)
    ),
    "its dual level": Setting(lambda: forward_ad._current_level, _set_level, stays=False),
    "the modes of torch": Setting(_modes, lambda before: None, stays=False),
    "numpy's errors": Setting(np.geterr, lambda before: np.seterr(**before)),
    "numpy's printing": Setting(np.get_printoptions, lambda before: np.set_printoptions(**before)),
}

#: In the order in which they are put back: first what the others need.
ALL: dict[str, Setting] = {**_OF_MODULES, **_OF_PYTHON, **_OF_THE_PROCESS, **_OF_TORCH}
ALL = {"its tracing": ALL["its tracing"], **ALL}


def ends_with_its_run() -> None:
    """Put back only what the rank stands on, in a process that no other run will find.

    Of modules it misses those that are gone: to compare each copies 1,200 shared pages.
    """
    for name in [name for name, setting in ALL.items() if setting.stays]:
        del ALL[name]
    mine = ALL["its modules"]
    ALL["its modules"] = replace(mine, same=lambda before: len(before) <= len(sys.modules))
