"""The process group of a rank, which it joins when its program begins.

* Rendezvous by ``FileStore`` in a 0700 folder: TCPStore would listen on all interfaces and
  let anybody in. Ranks on several machines meet in a store of the kernel's, to which their
  tunnels lead.
* gloo is pinned to one interface: loopback, or that which leads to the other machines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distkit.companions import load

if TYPE_CHECKING:
    from distkit.cluster.processes.rank_spec import Spec

#: Has NCCL tell its kernels' own times.
TIMING = "TORCH_NCCL_ENABLE_TIMING", "1"

#: By itself torch ends the process when a collective fails or seems to hang: the conductor sees to
#: that. To hear of other ranks a thread of NCCL would ask the store, which wants Python's lock; who
#: destroys the group may hold that, and joins the thread.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    **dict([TIMING]),
}

#: A rank waits so long for others to enter a run [s].
LATE = 0.5

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Group:
    """The default process group of this rank, and every group made beside it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.alone = False  # this rank has a dead one's place in the middle of a run
        self._joins = 0  # how often it was joined, should a script leave and return
        self._claimed = False  # a script called init_process_group and was given this group
        #: Every group made: to destroy one joins its threads with Python's lock held, and a thread
        #: that has just finished a work may want the lock, so no group is dropped.
        self._kept: list[Any] = []
        self._store: PatientStore | None = None
        self._init: Callable[..., Any] = dist.init_process_group

    def join(self) -> None:
        """Be a member of the group, when the others are; does nothing when it already is."""
        if not self._joins:
            self._join()
            # a rank that ends before all have joined would leave the others waiting
            assert self._store is not None
            self._store.set(f"distkit/joined/{self.spec.rank}", "")
            self._store.wait([f"distkit/joined/{r}" for r in range(self.spec.world_size)])

    def enter(self, run: int) -> None:
        """Wait for the other ranks of a run, so that its record does not begin with their skew.

        Not for long: one may have ended.
        """
        if self._store is not None:
            name = f"distkit/entered/{run}"
            self._store.set(f"{name}/{self.spec.rank}", "")
            with suppress(dist.DistStoreError):
                names = [f"{name}/{r}" for r in range(self.spec.world_size)]
                self._store.wait(names, timedelta(seconds=LATE))

    def _join(self) -> None:
        spec = self.spec
        if self.alone:
            raise RuntimeError(
                f"rank {spec.rank} replaces one that ended, and for it the default process group "
                "has not been initialized: a group needs all its ranks from the start. With "
                'on_crash="replace", let workers communicate through the store only.'
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
        self._store = PatientStore(_values(spec, name))  # torch's C++ does not keep it alive
        self._init(
            spec.backend, store=self._store, rank=spec.rank, world_size=spec.world_size, **options
        )

    # -- user code that brings its own set-up -----------------------------------

    def adopt_user_calls(self) -> None:
        """Let unmodified scripts call ``init_process_group``: they get this group.

        Scripts written for torchrun begin with it and end with ``destroy_process_group``. A
        second call without a destroy in between raises, as in stock torch.
        """
        stock = self._init

        def init_process_group(
            backend: str | None = None, init_method: str | None = None, **options: Any
        ) -> None:
            if dist.is_initialized():
                if self._claimed:
                    raise ValueError("trying to initialize the default process group twice!")
            elif options.get("store") is not None or init_method not in (None, "env://"):
                stock(backend, init_method, **options)
                return
            else:
                self._join()
            self._check(options)
            self._claimed = True

        for module in (dist, c10d):
            module.init_process_group = init_process_group  # type: ignore[attr-defined]
        self._keep_groups()

    def _keep_groups(self) -> None:
        helper = c10d._new_process_group_helper

        def new_process_group_helper(*args: Any, **options: Any) -> Any:
            made = helper(*args, **options)
            self._kept.append(made)
            return made

        c10d._new_process_group_helper = new_process_group_helper

    def leave_user_calls(self) -> None:
        """Let ``init_process_group`` be torch's own again."""
        for module in (dist, c10d):
            module.init_process_group = self._init  # type: ignore[attr-defined]

    def _check(self, options: dict[str, Any]) -> None:
        for name in ("rank", "world_size"):
            asked, have = options.get(name, -1), getattr(self.spec, name)
            if asked not in (-1, have):
                raise ValueError(
                    f"init_process_group({name}={asked}) on a rank whose {name} is {have}. "
                    f"Leave {name} out, or start as many ranks as the script wants."
                )


# -- the store that the group meets in --------------------------------------------------------

#: How often to look whether a key has come [s]. torch's own FileStore looks every 10 ms.
PERIOD = 0.001


#: A file that is gone, perhaps cleaned away, is waited for this long [s].
GONE = 1.0


def _values(spec: Spec, name: str) -> Any:
    if spec.hosts > 1:
        return load("distkit_hosts.remote.store").StoreClient(spec.folder, name)
    store = dist.FileStore(f"{spec.folder}/{name}", spec.world_size)
    store.set_timeout(timedelta(seconds=GONE))
    return store


class PatientStore(dist.Store):
    """A store that waits in Python, where an interrupt reaches it.

    torch's stores wait in C++ for up to 30 minutes and hear no signal: a ``new_group`` that
    not every member calls could only be ended together with its process.

    Args:
        place: where the values are: a FileStore, or what has its methods.
    """

    timeout: timedelta  # torch's own, which its type hints lack

    def __init__(self, place: Any) -> None:
        super().__init__()
        self._place = place
        self.set_timeout(timedelta(minutes=30))

    # the names and arguments of dist.Store, which torch's C++ calls

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._place.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return bytes(self._place.get(key))

    def add(self, key: str, num: int) -> int:
        """Count."""
        return int(self._place.add(key, num))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace a value if it is the expected one."""
        return bytes(self._place.compare_set(key, expected_value, desired_value))

    def check(self, keys: list[str]) -> bool:
        """True if all of these are there."""
        return bool(self._place.check(keys))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._place.delete_key(key))

    def num_keys(self) -> int:
        """The number of values."""
        return int(self._place.num_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """True if it has append as well: no file store has."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are there.

        Raises:
            DistStoreError: they have not come in time.
        """
        end = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self._place.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{keys} did not come within {timeout or self.timeout}")
            time.sleep(PERIOD)
