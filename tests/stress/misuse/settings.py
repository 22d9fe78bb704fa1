"""Settings of a rank's process that a run could change for the next."""

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
    """The settings by name, and the result of an all-reduce, which checks communication."""
    x = torch.ones(3, device="cpu")
    dist.all_reduce(x)
    return {"sum": x.tolist(), **_system_settings(), **_python_settings(), **_torch_settings()}


def _system_settings() -> dict[str, Any]:
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
    """A signal's handler; one of torch's DataLoader counts as the default."""
    handler = signal.getsignal(number)
    torchs = str(getattr(handler, "__module__", "")).startswith("torch.")
    return str(signal.SIG_DFL if torchs else handler).partition(" at ")[0]


def _python_settings() -> dict[str, Any]:
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


def _torch_settings() -> dict[str, Any]:
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
