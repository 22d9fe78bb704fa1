"""Options of a store, the same on all workers of a run, and the names of stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from distkit._format import count
from distkit.consistency import Rule, rule_of
from distkit.errors import KVStoreError

#: MXNet's default: arrays with at least this many elements are split over all servers.
BIGARRAY_BOUND = 1_000_000

#: The modes of a distributed store; with ``_device``, a worker sums its gradients on a device.
MODES = ("dist_sync", "dist_async", "dist_sync_device", "dist_async_device")

#: The names of all stores, for error messages.
_STORES = ", ".join(f'"{name}"' for name in MODES)

#: Possible effects of a worker's crash on workers that wait for it.
ON_CRASH = ("halt", "continue", "replace")


@dataclass(frozen=True)
class StoreOptions:
    """Options of a store, the same on all workers of a run.

    Args:
        mode: one of :data:`MODES`.
        bound: minimum size of an array that is split over all servers [elements].
        staleness: number of gradients by which a worker may be ahead of the slowest, or None for no
            limit.
        backup: number of workers that a round does not wait for.
        replication: number of servers that hold each value: 1, or 2 with a backup.
        on_crash: one of :data:`ON_CRASH`.

    Raises:
        KVStoreError: An option is invalid, or does not apply to the mode.

    >>> StoreOptions("dist_sync", backup=1).rule
    Synchronous(backup=1)
    """

    mode: str = "dist_sync"
    bound: int = BIGARRAY_BOUND
    staleness: int | None = None
    backup: int = 0
    replication: int = 1
    on_crash: str = "halt"

    def __post_init__(self) -> None:
        names = "bound", "staleness", "backup", "replication"
        numbers = {name: getattr(self, name) for name in names}
        for name, n in numbers.items():
            if n is not None and type(n) is not int:
                raise KVStoreError(
                    f"{'bigarray_' * (name == 'bound')}{name}={n!r}: expected an integer"
                    f"{', or None for no limit' * (name == 'staleness')}."
                )
        for is_invalid, text in (
            (self.bound < 0, f"bigarray_bound={self.bound}: expected 0 or more elements."),
            (self.mode not in MODES, f'unknown store "{self.mode}". Choose from: {_STORES}.'),
            (
                self.on_crash not in ON_CRASH,
                f"unknown on_crash={self.on_crash!r}. Choose from: {', '.join(ON_CRASH)}.",
            ),
            (
                self.staleness is not None and self.rule.has_rounds,
                f'staleness={self.staleness} does not apply to "{self.mode}", whose gradients are '
                f'never stale. Use "dist_async".',
            ),
            (
                self.staleness is not None and self.staleness < 0,
                f"staleness={self.staleness}: expected 0 or more gradients.",
            ),
            (
                self.backup and not self.rule.has_rounds,
                f'backup={self.backup} does not apply to "{self.mode}", which has no rounds. '
                f'Use "dist_sync".',
            ),
            (self.backup < 0, f"backup={self.backup}: expected 0 or more workers."),
            (
                self.replication not in (1, 2),
                f"replication={self.replication}: use 1, or 2 for a backup of each server.",
            ),
        ):
            if is_invalid:
                raise KVStoreError(text)

    @property
    def rule(self) -> Rule:
        """The consistency model."""
        return rule_of(self.mode, staleness=self.staleness, backup=self.backup)

    @property
    def crash_effect(self) -> str:
        """The effect of a worker's exit on the run, one of :data:`ON_CRASH`.

        ``"halt"`` applies only to rounds without backup workers. Without rounds, no worker waits
        for one that has exited; with backup workers, a round can complete without some workers.
        """
        halts = self.on_crash == "halt" and self.rule.has_rounds and not self.backup
        return self.on_crash if halts or self.on_crash == "replace" else "continue"

    def check_cluster(self, workers: int, servers: int) -> None:
        """Check that a cluster has enough workers and servers.

        Raises:
            KVStoreError: The cluster has too few.
        """
        for needed, available, option in (
            (self.replication, servers, "replication"),
            (self.backup + 1, workers, "backup"),
        ):
            if needed > available:
                raise KVStoreError(
                    f"{option}={getattr(self, option)} is too large for {count(workers, 'worker')} "
                    f"and {count(servers, 'server')}. "
                    f"Use a larger cluster or a smaller {option}."
                )

    @property
    def non_default(self) -> dict[str, Any]:
        """The options that differ from the defaults, without the mode."""
        options = asdict(self).items()
        return {k: v for k, v in options if k != "mode" and v != getattr(StoreOptions(), k)}

    def __str__(self) -> str:
        parts = (f"{k}={v!r}" for k, v in self.non_default.items())
        return ", ".join([f'"{self.mode}"', *parts])
