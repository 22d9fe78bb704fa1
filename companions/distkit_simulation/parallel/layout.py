"""Data, tensor and pipeline parallelism together. Pure, but for :meth:`Layout.mesh`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distkit.algorithms.catalogue import PIPELINES
from distkit.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The axes of the mesh, outermost first: ranks of a tensor-parallel group are neighbours.
AXES = ("dp", "pp", "tp")
#: The same with pipelines outermost: copies are neighbours, and stages far from each other.
MEGATRON = ("pp", "dp", "tp")
#: The sizes that tensor-parallel ranks divide.
SLICED = ("heads", "kv_heads", "hidden", "inner", "vocabulary", "sequence")


@dataclass(frozen=True)
class Layout:
    """dp · pp · tp ranks: copies of a model, its layers in stages, each layer in slices.

    All given numbers are checked before any process starts.

    Args:
        dp: data-parallel copies; each gets its part of the batch.
        tp: tensor-parallel ranks that share each layer.
        pp: pipeline stages' ranks.
        world: the number of ranks there are.
        heads: of attention; each tensor-parallel rank has as many of them.
        kv_heads: of keys and values, likewise.
        hidden: width of the model; ``inner`` that of the feed-forward layer.
        vocabulary: tokens of the embedding.
        sequence: tokens of a sample, if they are sharded too.
        layers: of the model; every stage has as many.
        batch: samples of a step over all copies.
        microbatches: of each copy.
        schedule: of the pipeline.
        chunks: stages on each rank of the pipeline.
        devices_per_host: a tensor-parallel group stays within a host.
        axes: the axes of the mesh, outermost first.

    Raises:
        LayoutError: Some numbers do not fit; the message names them and the nearest valid layouts.

    Example:
        >>> Layout(dp=2, tp=2, pp=2, world=8, heads=32, layers=32).place(5)
        {'dp': 1, 'pp': 0, 'tp': 1}
        >>> Layout(tp=3, heads=32, hidden=4096)
        Traceback (most recent call last):
        distkit.errors.LayoutError: Layout(dp=1, tp=3, pp=1) does not fit:
          heads = 32 cannot be divided by tp = 3
          hidden = 4096 cannot be divided by tp = 3
        The nearest that do: Layout(dp=1, tp=4, pp=1), Layout(dp=1, tp=2, pp=1)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    world: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    inner: int | None = None
    vocabulary: int | None = None
    sequence: int | None = None
    layers: int | None = None
    batch: int | None = None
    microbatches: int = 1
    schedule: str | None = None
    chunks: int = 1
    devices_per_host: int | None = None
    axes: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        numbers = asdict(self)
        if wrong := [*_no_counts(numbers)] or [*_misfits(SimpleNamespace(**numbers))]:
            raise LayoutError("\n  ".join([f"{self} does not fit:", *wrong]) + _remedy(numbers))

    def __str__(self) -> str:
        return f"Layout(dp={self.dp}, tp={self.tp}, pp={self.pp})"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> dict[str, int]:
        """The position of a rank on each axis.

        >>> Layout(dp=2, pp=2).place(1)
        {'dp': 0, 'pp': 1, 'tp': 0}
        """
        if not 0 <= rank < self.size:
            raise LayoutError(f"{self} has ranks 0 to {self.size - 1}, and no rank {rank}")
        return {axis: rank // self.stride(axis) % getattr(self, axis) for axis in self.axes}

    def stride(self, axis: str) -> int:
        """The distance of neighbours on an axis.

        >>> Layout(dp=2, tp=4, pp=3).stride("dp")
        12
        """
        inner = self.axes[self.axes.index(axis) + 1 :]
        return math.prod(getattr(self, other) for other in inner)

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one on one axis only, including itself.

        >>> Layout(dp=2, tp=2).group(0, "dp")
        [0, 2]
        """
        here = self.place(rank)
        others = [(other, self.place(other)) for other in range(self.size)]
        return [other for other, at in others if {**at, axis: here[axis]} == here]

    def mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Torch's mesh of these ranks, called on every one: ``mesh["tp"]`` is this rank's group.

        Raises:
            LayoutError: The run has another number of ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.get_world_size() != self.size:
            raise LayoutError(
                f"{self} is for {self.size} ranks, and this run has {dist.get_world_size()}: "
                f"give world={dist.get_world_size()}, and the layout is checked before"
            )
        shape = tuple(getattr(self, axis) for axis in self.axes)
        return init_device_mesh(device_type, shape, mesh_dim_names=self.axes)


# -- the rules ------------------------------------------------------------------------------


def _no_counts(numbers: dict[str, Any]) -> Iterator[str]:
    for name, value in numbers.items():
        if (
            name not in ("schedule", "axes")
            and value is not None
            and (type(value) is not int or value < 1)
        ):
            yield f"{name} = {value!r} is no positive whole number"


def _misfits(it: Any) -> Iterator[str]:
    """A sentence for each violated rule."""
    if it.world not in (None, it.dp * it.tp * it.pp):
        yield f"dp · tp · pp = {it.dp * it.tp * it.pp} ranks, but there are {it.world}"
    tp, stages, pieces = f"tp = {it.tp}", it.pp * it.chunks, it.dp * it.microbatches
    rules = [
        *((getattr(it, name), f"{name} = {getattr(it, name)}", it.tp, tp) for name in SLICED),
        (it.devices_per_host, f"{it.devices_per_host} devices of a host", it.tp, tp),
        (it.hidden, f"hidden = {it.hidden}", it.heads or 1, f"heads = {it.heads}"),
        (it.layers, f"{it.layers} layers", stages, f"pp · chunks = {it.pp} · {it.chunks}"),
        (it.batch, f"a batch of {it.batch}", pieces, f"dp · microbatches = {pieces}"),
    ]
    for value, what, divisor, by in rules:
        if value is not None and value % divisor:
            yield f"{what} cannot be divided by {by}"
    yield from _unscheduled(it)


def _unscheduled(it: Any) -> Iterator[str]:
    try:
        if it.schedule is not None:
            PIPELINES[it.schedule].check(it.pp, it.microbatches, it.chunks)
    except (KeyError, ValueError) as error:
        yield str(error.args[0])


def _remedy(numbers: dict[str, Any]) -> str:
    if [*_no_counts(numbers)]:
        return ""
    asked = [numbers[axis] for axis in ("dp", "tp", "pp")]
    near = sorted(
        _candidates(asked, numbers["world"]),
        key=lambda at: sum(abs(math.log(a / b)) for a, b in zip(at, asked, strict=True)),
    )
    fits = (
        f"Layout(dp={dp}, tp={tp}, pp={pp})"
        for dp, tp, pp in near
        if not [*_misfits(SimpleNamespace(**numbers | {"dp": dp, "tp": tp, "pp": pp}))]
    )
    found = ", ".join(islice(fits, 2))
    return f"\nThe nearest that do: {found}" if found else "\nNo layout fits the other numbers."


def _candidates(asked: list[int], world: int | None) -> Iterator[tuple[int, ...]]:
    """All layouts of the world; without one, all up to twice the given numbers."""
    if world is None:
        yield from product(*(range(1, 2 * most + 1) for most in asked))
    else:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        for dp, tp in product(divisors, repeat=2):
            if world % (dp * tp) == 0:
                yield dp, tp, world // (dp * tp)
