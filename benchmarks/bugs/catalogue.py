"""What an entry of the catalogue of bugs says, and helpers that the programs share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distkit.diagnosis.findings import Kind

#: A line with this comment is one that the explanation must name.
MARK = "# <-"


@dataclass(frozen=True)
class Bug:
    """A minimal program with one mistake, and what its explanation must say.

    ``kinds``, ``culprits`` and ``says`` (words of the remedy, or of the message) are what is
    expected; ``thread`` is a public thread about such a mistake; ``how`` the program ends:
    it "hangs", "fails" or "finishes".
    """

    program: Callable[[], None]
    theme: str
    thread: str
    kinds: tuple[Kind, ...]
    culprits: tuple[int, ...]
    says: tuple[str, ...]
    ranks: int
    how: str

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.__name__

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The marked lines, as ``file:number``."""
        source, first = inspect.getsourcelines(self.program)
        file = Path(inspect.getfile(self.program)).name
        return tuple(f"{file}:{first + i}" for i, text in enumerate(source) if MARK in text)


#: The bugs of all themes, in the order in which their modules are imported.
BUGS: list[Bug] = []


def bug(
    kind: Kind | tuple[Kind, ...],
    culprits: tuple[int, ...],
    says: str | tuple[str, ...],
    thread: str = "",
    *,
    ranks: int = 3,
    how: str = "hangs",
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a program into the catalogue."""

    def enter(program: Callable[[], None]) -> Callable[[], None]:
        theme = program.__module__.rpartition(".")[2]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        words = says if isinstance(says, tuple) else (says,)
        BUGS.append(Bug(program, theme, thread, kinds, culprits, words, ranks, how))
        return program

    return enter


# -- what the programs share ------------------------------------------------------------


def rank() -> int:
    """This rank."""
    return dist.get_rank()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of ones."""
    return torch.ones(*shape, dtype=dtype)


def rows(x: torch.Tensor, n: int = 3) -> list[torch.Tensor]:
    """A list of tensors to gather into."""
    return [torch.zeros_like(x) for _ in range(n)]


def ddp(module: torch.nn.Module | None = None) -> DistributedDataParallel:
    """A small model, its gradients averaged over the ranks in several buckets."""
    net = module or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    return DistributedDataParallel(net)


class Experts(torch.nn.Module):
    """A layer for all tokens, and experts of which each token sees one."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(experts))

    def forward(self, x: torch.Tensor, *chosen: int) -> torch.Tensor:
        """Send all rows through the chosen experts."""
        h = self.shared(x)
        return torch.stack([self.experts[i](h) for i in chosen]).sum(0)
