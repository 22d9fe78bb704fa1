"""The process group of a rank: joined by a file in a private folder, left by cutting its wires.

* Rendezvous by ``FileStore`` in a 0700 folder: TCPStore would listen on all interfaces and
  let anybody in. Each generation has a file of its own: joining twice on one store hangs.
  Ranks on several machines meet in a store of the kernel's, to which their tunnels lead.
* gloo is pinned to one interface: loopback, or that which leads to the other machines.
* A blocked gloo call ends when its connections are cut, and a fresh generation takes some
  milliseconds. NCCL is told to abort: its kernels end, and so does what waits for their stream, in
  Python or in C++.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distkit.cluster.hosts.store import StoreClient
from distkit.cluster.rank.wires import REST, Wires
from distkit.recording.witness import LATE

if TYPE_CHECKING:
    from distkit.cluster.processes.rank_spec import Spec

#: NCCL gets so long to abort [s], on each rank by itself.
ABORT = 1.0

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

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Group:
    """The default process group of this rank, and every group made beside it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.generation = -1
        self._joins = 0  # how often this generation was joined, should a script leave and return
        self._claimed = False  # a script called init_process_group and was given this group
        self.keeps = False  # the groups that this run makes are for those after it, too
        self.wires = Wires()
        self._worlds: list[Any] = []  # the default groups of the past that a program may hold
        self._kept: list[Any] = []  # every group made, until it is safe to let go of it
        self.busy: list[dist.Work] = []  # the collectives that a run has left under way …
        self.released = False  # … or it was released, perhaps from one that nobody has noted yet
        self._stuck: list[Any] = []  # groups that a thread of gloo may never leave, and …
        self._stuck_works: list[dist.Work] = []  # … what they have under way
        self._store: PatientStore | None = None
        self._init: Callable[..., Any] = dist.init_process_group

    def join(self, generation: int) -> None:
        """Be a member of this generation's group; does nothing when it already is."""
        self._claimed = self.keeps = False
        if generation == self.generation:
            self._let_go(keep=dist.group.WORLD)
            return
        self.sever()  # what is under way in the old group would hold up its end
        if dist.is_initialized():
            self._worlds.append(dist.group.WORLD)
            with suppress(Exception):
                dist.destroy_process_group()
            if self.spec.device != "cpu":
                torch.cuda.empty_cache()  # what the run has left is for whoever shares the GPU
        self.generation, self._joins = generation, 0
        self.wires.clear()
        self._let_go(keep=None)
        self._join()
        self._meet()
        renew(self._worlds, dist.group.WORLD, kept=self._stuck)
        self._worlds.clear()

    def _meet(self) -> None:
        """Wait until all are members: whoever ends from now on leaves nobody who still joins."""
        if self._store is not None:
            self._store.set(f"distkit/joined/{self.spec.rank}", "")
            self._store.wait([f"distkit/joined/{r}" for r in range(self.spec.world_size)])

    def enter(self, run: int) -> None:
        """Wait for the other ranks of a run, but not for long: one may have ended."""
        if self._store is not None:
            name = f"distkit/entered/{run}"
            self._store.set(f"{name}/{self.spec.rank}", "")
            with suppress(dist.DistStoreError):
                names = [f"{name}/{r}" for r in range(self.spec.world_size)]
                self._store.wait(names, timedelta(seconds=LATE))

    def begin_keys(self, of: str) -> None:
        """Have the default store hold what was set under this name: nothing of another run's."""
        world, groups = dist.group.WORLD, c10d._world.pg_map
        if world in groups and self._store is not None:
            groups[world] = groups[world][0], dist.PrefixStore(of, self._store)

    def keep(self) -> None:
        """Leave what this run makes, groups and keys, to those after it that say so, too."""
        self.keeps = True
        self.begin_keys("kept")

    def stay_out(self) -> None:
        """Be in no group: this rank has a dead one's place in the middle of a run."""
        self.generation = -1

    def _join(self) -> None:
        spec = self.spec
        if self.generation < 0:
            raise RuntimeError(
                f"rank {spec.rank} replaces one that ended, and for it the default process group "
                "has not been initialized: a group needs all its ranks from the start. With "
                'on_crash="replace", let workers communicate through the store only.'
            )
        os.environ["GLOO_SOCKET_IFNAME"] = spec.interface or LOOPBACK
        if spec.interface:
            os.environ["NCCL_SOCKET_IFNAME"] = f"={spec.interface}"
        place = self._meeting_place(f"store-{self.generation}-{self._joins}")
        self._joins += 1
        options: dict[str, Any] = {}
        if spec.device != "cpu":
            torch.cuda.set_device(spec.device)
            if spec.backend == "nccl":
                options["device_id"] = torch.device(spec.device)
        self._store = PatientStore(place)  # torch's C++ does not keep it alive
        hook = sys.excepthook  # torch puts its own around it, each time
        self._init(
            spec.backend, store=self._store, rank=spec.rank, world_size=spec.world_size, **options
        )
        sys.excepthook = hook

    def _meeting_place(self, name: str) -> FilePlace | StoreClient:
        spec = self.spec
        if spec.hosts > 1:
            return StoreClient(spec.folder, name)
        return FilePlace(f"{spec.folder}/{name}", spec.world_size)

    def _let_go(self, keep: Any) -> None:
        """Drop the groups of the past, after a rest.

        To destroy a group joins its threads with Python's lock held, and a thread that has just
        finished a work may want the lock to drop it: that would be a deadlock. So the last
        reference is ours, not that of a user's model, and goes when the threads have come to rest.
        One that has not after all is never joined: gloo at times misses that a wire was cut.
        """
        past = [group for group in self._kept if group is not keep]
        if past:
            time.sleep(REST)
            if self.released or not all(work.is_completed() for work in self.busy):
                self._stuck += past
                self._stuck_works += self.busy
            self._kept, self.busy = [group for group in self._kept if group is keep], []
        self.released = False

    def intact(self) -> bool:
        """True if the next run can use this group: neither severed nor destroyed, and alone."""
        alone = self.keeps or len(c10d._world.pg_map) == 1
        return not self.wires.severed and self._joins == 1 and dist.is_initialized() and alone

    def made(self) -> int:
        """The number of groups made in this generation: torch names the next one by it."""
        return int(c10d._world.group_count)

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
            self._worlds.append(dist.group.WORLD)
            self._check(options)
            self._claimed = True

        for module in (dist, c10d):
            module.init_process_group = init_process_group  # type: ignore[attr-defined]
        self.wires.note_groups(self._kept.append)

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

    def sever(self) -> None:
        """Have what is blocked on the group raise: cut its wires, and abort NCCL."""
        if self.spec.backend == "nccl" and not self.wires.severed:
            self._abort()
        self.wires.sever()

    def _abort(self) -> None:
        """End what NCCL does on the GPU, in all groups at once: one may wait for another's kernels.

        That may hang in the driver; who released this rank then ends it.
        """
        threads = [
            threading.Thread(target=_quietly, args=(group.abort,), daemon=True)
            for group in self._kept
            if isinstance(group, dist.ProcessGroup)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + ABORT
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def _quietly(call: Callable[[], object]) -> None:
    with suppress(Exception):
        call()


# -- the store that the group meets in --------------------------------------------------------

#: How often to look whether a key has come [s]. torch's own FileStore looks every 10 ms.
PERIOD = 0.001


class FilePlace:
    """A ``dist.FileStore``, unless its file is gone: it would wait for it where no interrupt comes.

    Args:
        path: of the file, in a folder that only this user can enter.
        world_size: how many ranks meet.
    """

    def __init__(self, path: str, world_size: int) -> None:
        self._path, self._store = path, dist.FileStore(path, world_size)

    def __getattr__(self, name: str) -> Any:
        if not os.path.exists(self._path):  # noqa: PTH110  # a third of the time
            raise dist.DistStoreError(
                f"{self._path} was removed, perhaps by a program that cleans temporary folders: "
                "the ranks cannot meet without it. Make the cluster again."
            )
        return getattr(self._store, name)


class PatientStore(dist.Store):
    """A store that waits in Python, where an interrupt reaches it.

    torch's stores wait in C++ for up to 30 minutes and hear no signal: a ``new_group`` that
    not every member calls could only be ended together with its process.

    Args:
        place: where the values are.
    """

    def __init__(self, place: FilePlace | StoreClient) -> None:
        super().__init__()
        self._place = place
        self._timeout = timedelta(minutes=30)

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

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout for a value."""
        self._timeout = timeout

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
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._place.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{keys} did not come within {timeout or self._timeout}")
            time.sleep(PERIOD)


# -- groups of the past ----------------------------------------------------------------------
#
# A module that is imported while there is a group may keep it: ``def f(x, group=group.WORLD)``,
# as ``torch.distributed.nn.functional`` does, a constant, a class attribute. The module outlives
# the group: ranks live on, and after an interrupt or a failure they meet in a new one.

#: How many names the modules had that ranks share with the process they are forked from.
_shared: dict[str, int] = {}

#: Of so many objects the collector is asked at once: its answer is a list.
AT_ONCE = 10_000


def share_modules() -> None:
    """Remember which modules the ranks to come share, and how large these are."""
    _shared.update((name, _size(module)) for name, module in list(sys.modules.items()))


def _written_modules() -> list[Any]:
    """The modules that may hold a group: to look at all of them would copy their shared pages."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.distributed") or _size(module) != _shared.get(name)
    ]


def _size(module: Any) -> int:
    return len(getattr(module, "__dict__", ()))


def renew(old: list[Any], new: Any, kept: Sequence[Any] = ()) -> None:
    """Put ``new`` into every module, class, object, closure and default argument that holds one.

    What is only local to a running function stays, and so do lists and sets.

    Args:
        old: the groups of the past.
        new: the group of today.
        kept: what the caller itself holds: a group that is held there alone is not looked for.
    """
    if not _held(old, kept):
        return
    stale = {id(group) for group in old}
    holders = sorted(
        _holders(old, stale), key=lambda holder: not _is_class(holder)
    )  # before its dict
    # frozen objects are not among those of the collector; modules are all that programs write to
    for holder in [*holders, *_written_modules()]:
        if type(holder) is FunctionType:
            given = holder.__defaults__ or ()
            holder.__defaults__ = tuple(new if id(value) in stale else value for value in given)
        elif type(holder) is CellType and _any(gc.get_referents(holder), stale):
            holder.cell_contents = new
        if _is_class(holder):
            for name in _names(dict(vars(holder)), stale):
                setattr(holder, name, new)  # its cache has to know
            continue
        for space in _spaces(holder):
            space.update(dict.fromkeys(_names(space, stale), new))


def _held(old: list[Any], kept: Sequence[Any] = ()) -> bool:
    """True if anybody but these lists refers to one of the old ones."""
    nobodys = object()
    held = {id(group): group for group in [*old, nobodys]}
    *counts, alone = [sys.getrefcount(group) for group in held.values()]
    lists = [sum(one is group for one in (*old, *kept)) for group in held.values()]
    return any(count - n > alone - 1 for count, n in zip(counts, lists, strict=False))


def _holders(old: list[Any], stale: set[int]) -> list[Any]:
    """The collector's objects that hold one, also in a dict or tuple that it does not follow.

    After an import of torch's compiler it knows a million objects: loops over them are C's.
    """
    known = gc.get_objects()
    parts = [
        held
        for n in range(0, len(known), AT_ONCE)
        for held in gc.get_referents(*known[n : n + AT_ONCE])
        if type(held) in (dict, tuple) and not gc.is_tracked(held) and _any(held, stale)
    ]
    direct = gc.get_referrers(*old)
    parts += [holder for holder in direct if type(holder) in (dict, tuple)]
    return [*direct, *gc.get_referrers(*parts)]


def _is_class(holder: Any) -> bool:
    return issubclass(type(holder), type)  # isinstance would ask objects that pretend


def _any(held: Any, stale: set[int]) -> bool:
    values: Iterable[Any] = held.values() if type(held) is dict else held
    return any(id(value) in stale for value in values)


def _spaces(holder: Any) -> list[dict[str, Any]]:
    """The dictionaries in which something keeps what it refers to by name."""
    if type(holder) is dict:
        return [holder]
    found = [held for held in gc.get_referents(holder) if type(held) is dict]
    try:  # an object's own may not exist before one asks
        found.append(object.__getattribute__(holder, "__dict__"))
    except AttributeError:
        return found
    return found


def _names(space: dict[str, Any], stale: set[int]) -> list[str]:
    return [name for name, value in space.items() if id(value) in stale]
