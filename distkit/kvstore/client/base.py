"""The base class of stores, so that ``create`` and ``Trainer`` accept your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

from distkit.errors import KVStoreError

_Class = TypeVar("_Class", bound="type[KVStoreBase]")


class KVStoreBase:
    """A store for data-parallel training: subclass it, and register the class.

    ``Trainer`` needs :meth:`broadcast` and :meth:`pushpull` of one key and its tensors, one for
    each device; and :meth:`is_capable`, which says whether weights can be updated in the store.

    >>> @KVStoreBase.register
    ... class Alone(KVStoreBase):
    ...     def pushpull(self, key, value, out=None, priority=0):
    ...         return value
    >>> from distkit import kvstore
    >>> type(kvstore.create("alone")).__name__
    'Alone'
    """

    #: The capability to update weights.
    OPTIMIZER: ClassVar[str] = "optimizer"
    #: The classes that were registered, by name in lower case.
    kv_registry: ClassVar[dict[str, type[KVStoreBase]]] = {}

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Let ``create`` make stores of this class, by its name in lower case; a later one wins."""
        if not isinstance(klass, type) or not issubclass(klass, KVStoreBase):
            raise KVStoreError(f"register got {klass!r}. Give a subclass of kvstore.KVStoreBase.")
        KVStoreBase.kv_registry[klass.__name__.lower()] = klass
        return klass

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write worker 0's ``value`` to ``out``, on all workers."""
        raise self._lacks("broadcast")

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Write the sum of all workers' ``value`` to ``out``, by default to ``value``."""
        raise self._lacks("pushpull")

    def set_optimizer(self, optimizer: Any) -> None:
        """Update weights with this optimizer."""
        raise self._lacks("set_optimizer")

    def is_capable(self, capability: str) -> bool:
        """True if the store can do this: "optimizer" is to update weights.

        Raises:
            KVStoreError: an unknown capability.
        """
        if capability.lower() != self.OPTIMIZER:
            raise KVStoreError(f"unknown capability {capability!r}. There is: 'optimizer'.")
        return False

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Save what its optimizer keeps."""
        raise self._lacks("save_optimizer_states")

    def load_optimizer_states(self, fname: str | Path) -> None:
        """Load what :meth:`save_optimizer_states` saved."""
        raise self._lacks("load_optimizer_states")

    @property
    def type(self) -> str:
        """The name it was created by."""
        return self.__class__.__name__.lower()

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """The number of workers that share the store."""
        return 1

    def _lacks(self, what: str) -> KVStoreError:
        return KVStoreError(f"{self.__class__.__name__} has no {what}. Define it in the class.")
