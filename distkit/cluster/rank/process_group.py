"""Creates a rank's process group and the group's store, before the rank's program starts.

* Rendezvous uses a ``FileStore`` in a 0700 folder, because a TCPStore would listen on all
  interfaces without authentication. Ranks on several machines use the kernel's store through their
  tunnels.
* gloo is pinned to one interface: loopback, or the interface to the other machines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distkit.cluster.processes.rank_spec import Spec
from distkit.imports import load
from distkit.recording.pending import hook

#: Enables NCCL's timing of its kernels.
TIMING = "TORCH_NCCL_ENABLE_TIMING", "1"

#: Disables torch's handling of failed or hanging collectives, which aborts the process; the
#: conductor handles them. torch's monitor thread could also deadlock: it queries the store, which
#: needs the GIL, while a thread that holds the GIL destroys the group and joins the monitor.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    **dict([TIMING]),
}

#: Interval between polls for a key [s]. Connecting a group takes several waits, and torch's
#: FileStore polls only every 10 ms.
POLL_INTERVAL = 0.001

#: Timeout for opening a store's file, which a cleanup program may have removed [s].
FILE_TIMEOUT = 1.0

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Group:
    """This rank's default process group and its other groups."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.is_replacement = False  # this rank replaces a dead rank and has no group
        self._joins = 0  # number of joins, since a script may destroy and recreate the group
        self._claimed = False  # a script called init_process_group and got this group
        #: Keeps every group alive: destroying a group joins its threads while holding the GIL, and
        #: a thread that completes a Work object may need the GIL.
        self._groups: list[Any] = []
        self._store: Any = None
        self._init: Callable[..., Any] = dist.init_process_group

    def enter(self, run: int) -> None:
        """Wait for the other ranks of a run, so that its trace excludes startup skew.

        This also prevents a rank from ending before all ranks have joined the group, which would
        leave the others waiting.
        """
        name = f"distkit/entered/{run}"
        self._store.set(f"{name}/{self.spec.rank}", "")
        self._store.wait([f"{name}/{r}" for r in range(self.spec.world_size)])

    def join(self) -> None:
        """Join the group.

        Raises:
            RuntimeError: this rank replaces a dead one.
        """
        spec = self.spec
        if self.is_replacement:
            raise RuntimeError(
                f"rank {spec.rank} replaces a process that exited, and its default process group "
                "has not been initialized: a group needs all its ranks from the start. With "
                'on_crash="replace", workers can communicate only through the store.'
            )
        os.environ["GLOO_SOCKET_IFNAME"] = spec.interface or LOOPBACK
        if spec.interface:
            os.environ["NCCL_SOCKET_IFNAME"] = f"={spec.interface}"
        name = f"{spec.store}-{self._joins}"
        self._joins += 1
        options: dict[str, Any] = {}
        if spec.device != "cpu":
            torch.cuda.set_device(spec.device)
            if spec.backend == "nccl":
                options["device_id"] = torch.device(spec.device)
        # kept alive here, because C++ does not own a Python store
        self._store = open_store(spec.folder, name, spec.world_size, hosts=spec.hosts)
        self._init(
            spec.backend, store=self._store, rank=spec.rank, world_size=spec.world_size, **options
        )

    # -- programs that call init_process_group ----------------------------------

    def intercept_init(self) -> None:
        """Replace ``init_process_group``, so that unmodified scripts get this group.

        Scripts for torchrun begin with this call and end with ``destroy_process_group``. A second
        call without a destroy in between raises an error, as in torch.
        """
        undo = ExitStack()  # never closed: the hooks stay until the process exits
        for module in (dist, c10d):
            hook(undo, module, "init_process_group", self._init_hook)
        hook(undo, c10d, "_new_process_group_helper", self._new_group_hook)

    def _init_hook(
        self,
        init: Callable[..., None],
        backend: str | None = None,
        init_method: str | None = None,
        **options: Any,
    ) -> None:
        if dist.is_initialized():
            if self._claimed:
                raise ValueError("trying to initialize the default process group twice!")
        elif options.get("store") is not None or init_method not in (None, "env://"):
            init(backend, init_method, **options)
            return
        else:
            self.join()
        for name in ("rank", "world_size"):
            requested, actual = options.get(name, -1), getattr(self.spec, name)
            if requested not in (-1, actual):
                raise ValueError(
                    f"init_process_group got {name}={requested}, but this process has "
                    f"{name}={actual}. Leave {name} out, or start as many ranks as the script "
                    "expects."
                )
        self._claimed = True

    def _new_group_hook(self, create: Callable[..., Any], *args: Any, **options: Any) -> Any:
        group = create(*args, **options)
        self._groups.append(group)
        return group


# -- the store -------------------------------------------------------------------------------------


def open_store(folder: str, name: str, ranks: int, *, hosts: int = 1) -> PollingStore:
    """Return a store in a file, or the kernel's store for ranks on several machines."""
    if hosts > 1:
        return PollingStore(load("distkit_hosts.remote.store").StoreClient(folder, name).call)
    file = dist.FileStore(f"{folder}/{name}", ranks)
    file.set_timeout(timedelta(seconds=FILE_TIMEOUT))
    return PollingStore(lambda method, *arguments: getattr(file, method)(*arguments))


class PollingStore(dist.Store):
    """A ``dist.Store`` whose waits poll for their keys.

    Args:
        call: a function that takes a method's name and arguments, and calls the method on the
            ``dist.Store`` that holds the values.
    """

    timeout: timedelta  # missing from torch's type hints

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self.set_timeout(timedelta(minutes=30))
        # the methods that do not wait, by the names that torch's C++ looks up
        for name in ("set", "add", "compare_set", "check"):
            setattr(self, name, partial(call, name))
        self.deleteKey, self.getNumKeys = partial(call, "delete_key"), partial(call, "num_keys")

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return bytes(self._call("get", key))

    # torch's versions would call the recorder's hooks recursively

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: the timeout has passed.
        """
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"keys not set within {timeout or self.timeout}: {keys}")
            time.sleep(POLL_INTERVAL)
