"""Settings of a rank's process: all that one run could change for the next."""

from __future__ import annotations

import builtins
import decimal
import faulthandler
import gc
import locale
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def settings() -> dict[str, Any]:
    """By name, and the sum over all ranks of an all-reduce to show that they still can talk."""
    x = torch.ones(3, device="cpu")
    dist.all_reduce(x)
    return {"sum": x.tolist(), **_of_the_system(), **_of_python(), **_of_torch()}


def _of_the_system() -> dict[str, Any]:
    os.umask(mask := os.umask(0))
    return {
        "folder": os.getcwd(),
        "environment": sorted(os.environ),
        "rank": os.environ["RANK"],
        "umask": mask,
        "nice": os.nice(0),
        "processors": len(os.sched_getaffinity(0)),
        "limits": [
            resource.getrlimit(getattr(resource, name))
            for name in sorted(vars(resource))
            if name.startswith("RLIMIT_")
        ],
        "handlers": {n: _handler(n) for n in sorted(signal.valid_signals()) if n != signal.SIGINT},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timers": [signal.getitimer(n) for n in range(3)],
        "descriptors": [os.path.exists(f"/proc/self/fd/{n}") for n in range(3)],
        "socket timeout": socket.getdefaulttimeout(),
    }


def _handler(number: int) -> str:
    """Who handles a signal; torch's DataLoader may, for its workers."""
    handler = signal.getsignal(number)
    torchs = str(getattr(handler, "__module__", "")).startswith("torch.")
    return str(signal.SIG_DFL if torchs else handler).partition(" at ")[0]


def _of_python() -> dict[str, Any]:
    return {
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "finders": len(sys.meta_path),
        "path hooks": len(sys.path_hooks),
        "locale": locale.setlocale(locale.LC_ALL),
        "decimal": decimal.getcontext().prec,
        "recursion": sys.getrecursionlimit(),
        "switching": sys.getswitchinterval(),
        "digits": sys.get_int_max_str_digits(),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "warnings": [*map(str, warnings.filters)],
        "showing warnings": warnings.showwarning.__module__,
        "faults": faulthandler.is_enabled(),
        "hooks": [
            h.__module__
            for h in (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)
        ],
        "streams": [hasattr(s, "write") for s in (sys.stdout, sys.stderr, sys.__stderr__)],
        "builtins": [n for n in dir(builtins) if getattr(builtins, n) is None and n != "__spec__"],
        "modules": [
            n
            for n in (
                "pickle",
                "torch",
                "json",
                "queue",
                "distkit.cluster.rank.rank",
                "threading",
                "socket",
            )
            if sys.modules.get(n) is None
        ],
        "functions": [f.__module__ for f in (time.sleep, time.monotonic, os.getpid)],
    }


def _of_torch() -> dict[str, Any]:
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.empty(1).device),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "shown": f"{torch.tensor(1 / 3)}",
        "numpy": (np.geterr(), str(np.float64(1 / 3))),
        "distributed": [f.__module__ for f in (dist.all_reduce, dist.barrier, dist.Work.wait)],
    }
