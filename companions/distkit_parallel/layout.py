"""Layouts of data, tensor and pipeline parallelism. No side effects, except :meth:`Layout.mesh`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distkit.errors import LayoutError
from distkit_parallel.schedules import PIPELINES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The axes of the mesh, outermost first: ranks of a tensor-parallel group are neighbors.
AXES = ("dp", "pp", "tp")
#: The axes with pipelines outermost: copies are neighbors, and stages are far apart.
MEGATRON = ("pp", "dp", "tp")
#: The sizes that tensor parallelism divides.
SLICED = ("heads", "kv_heads", "hidden", "inner", "vocabulary", "sequence")


@dataclass(frozen=True)
class Layout:
    """A division of a model over dp · pp · tp ranks: into copies, stages of layers, and slices.

    The numbers are checked when the layout is created, before any process starts.

    Args:
        dp: the number of data-parallel copies; each gets an equal part of the batch.
        tp: the number of tensor-parallel ranks that share each layer.
        pp: the number of pipeline ranks.
        world: the number of available ranks.
        heads: the number of attention heads, divided evenly among tensor-parallel ranks.
        kv_heads: the number of key and value heads, divided evenly among tensor-parallel ranks.
        hidden: the width of the model.
        inner: the width of the feed-forward layer.
        vocabulary: the number of tokens in the embedding.
        sequence: the number of tokens in a sample, if they are also sharded.
        layers: the number of layers, divided evenly among the stages.
        batch: the number of samples in a step, over all copies.
        microbatches: the number of micro-batches in each copy.
        schedule: the name of the pipeline schedule.
        chunks: the number of stages on each pipeline rank.
        devices_per_host: the number of devices on a host, a multiple of ``tp``, so that each
            tensor-parallel group fits on one host.
        axes: the axes of the mesh, outermost first.

    Raises:
        LayoutError: the numbers do not fit; the message lists the problems and valid layouts.

    Example:
        >>> Layout(dp=2, pp=2, tp=2, world=8, heads=32, layers=32).coordinates(5)
        {'dp': 1, 'pp': 0, 'tp': 1}
        >>> Layout(tp=3, heads=32, hidden=4096)
        Traceback (most recent call last):
        distkit.errors.LayoutError: Layout(dp=1, pp=1, tp=3) does not fit:
          heads = 32 is not divisible by tp = 3
          hidden = 4096 is not divisible by tp = 3
        The nearest valid layouts: Layout(dp=1, pp=1, tp=4), Layout(dp=1, pp=1, tp=2)
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
        if problems := [*_invalid_numbers(numbers)] or [*_violations(SimpleNamespace(**numbers))]:
            raise LayoutError("\n  ".join([f"{self} does not fit:", *problems]) + _remedy(numbers))

    def __str__(self) -> str:
        return f"Layout(dp={self.dp}, pp={self.pp}, tp={self.tp})"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on each axis.

        >>> Layout(dp=2, pp=2).coordinates(1)
        {'dp': 0, 'pp': 1, 'tp': 0}
        """
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} does not exist: {self} has ranks 0 to {self.size - 1}")
        return {axis: rank // self.stride(axis) % getattr(self, axis) for axis in self.axes}

    def stride(self, axis: str) -> int:
        """Return the distance between neighboring ranks on an axis.

        >>> Layout(dp=2, pp=3, tp=4).stride("dp")
        12
        """
        inner = self.axes[self.axes.index(axis) + 1 :]
        return math.prod(getattr(self, other) for other in inner)

    def mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Create torch's device mesh, in which ``mesh["tp"]`` is this rank's tensor-parallel group.

        All ranks must call this method.

        Raises:
            LayoutError: the run has a different number of ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.get_world_size() != self.size:
            raise LayoutError(
                f"{self} needs {self.size} ranks, but this run has {dist.get_world_size()}. Pass "
                f"world={dist.get_world_size()} to check the layout before a run"
            )
        shape = tuple(getattr(self, axis) for axis in self.axes)
        return init_device_mesh(device_type, shape, mesh_dim_names=self.axes)


# -- rules ----------------------------------------------------------------------------------


def _invalid_numbers(numbers: dict[str, Any]) -> Iterator[str]:
    for name, value in numbers.items():
        if (
            name not in ("schedule", "axes")
            and value is not None
            and (type(value) is not int or value < 1)
        ):
            yield f"{name} = {value!r} is not a positive integer"


def _violations(layout: Any) -> Iterator[str]:
    """Yield a message for each violated rule."""
    if layout.world not in (None, ranks := layout.dp * layout.tp * layout.pp):
        yield f"dp · pp · tp = {ranks} ranks, but there are {layout.world}"
    rules = [
        *(
            (
                getattr(layout, name),
                f"{name} = {getattr(layout, name)}",
                layout.tp,
                f"tp = {layout.tp}",
            )
            for name in SLICED
        ),
        (
            layout.devices_per_host,
            f"devices_per_host = {layout.devices_per_host}",
            layout.tp,
            f"tp = {layout.tp}",
        ),
        (layout.hidden, f"hidden = {layout.hidden}", layout.heads or 1, f"heads = {layout.heads}"),
        (
            layout.layers,
            f"layers = {layout.layers}",
            layout.pp * layout.chunks,
            f"pp · chunks = {layout.pp} · {layout.chunks}",
        ),
        (
            layout.batch,
            f"batch = {layout.batch}",
            micro_batches := layout.dp * layout.microbatches,
            f"dp · microbatches = {micro_batches}",
        ),
    ]
    for value, label, divisor, divisor_label in rules:
        if value is not None and value % divisor:
            yield f"{label} is not divisible by {divisor_label}"
    try:
        if layout.schedule is not None:
            PIPELINES[layout.schedule].check(layout.pp, layout.microbatches, layout.chunks)
    except (KeyError, ValueError) as error:
        yield str(error.args[0])


def _remedy(numbers: dict[str, Any]) -> str:
    if [*_invalid_numbers(numbers)]:
        return ""
    requested = [numbers[axis] for axis in ("dp", "tp", "pp")]
    nearest = sorted(
        _candidates(requested, numbers["world"]),
        key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, requested, strict=True)),
    )
    valid = (
        f"Layout(dp={dp}, pp={pp}, tp={tp})"
        for dp, tp, pp in nearest
        if not [*_violations(SimpleNamespace(**numbers | {"dp": dp, "tp": tp, "pp": pp}))]
    )
    suggestions = ", ".join(islice(valid, 2))
    return (
        f"\nThe nearest valid layouts: {suggestions}"
        if suggestions
        else "\nNo valid layout exists for the other numbers."
    )


def _candidates(requested: list[int], world: int | None) -> Iterator[tuple[int, ...]]:
    """Yield the layouts of ``world`` ranks; for None, those up to twice the requested sizes."""
    if world is None:
        yield from product(*(range(1, 2 * number + 1) for number in requested))
    else:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        for dp, tp in product(divisors, repeat=2):
            if world % (dp * tp) == 0:
                yield dp, tp, world // (dp * tp)
