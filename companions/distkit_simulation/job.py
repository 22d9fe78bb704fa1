"""Predict a training job's step time (with a breakdown), memory per rank, and best layout.

The time of a matrix product is its operations divided by the achievable FLOP/s, plus the bytes of
its three matrices divided by the memory bandwidth, so efficiency grows with size. Other operations
(norms, activations, dropout, attention scores) are memory-bound. Collectives are rings over the
links between their ranks. No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from distkit._format import aligned, human_seconds
from distkit.errors import LayoutError
from distkit.events import Op
from distkit.trace.info import RankInfo
from distkit.trace.trace import Trace
from distkit.views.scene import figures
from distkit.views.scene.theme import rank_color
from distkit_parallel.layout import AXES, MEGATRON, Layout
from distkit_parallel.memory import GIB, States, Transformer
from distkit_parallel.schedules import PIPELINES
from distkit_simulation import cost
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import Stragglers, Writer
from distkit_simulation.training import simulate_pipeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: HALF_BYTES is the size of a number in half precision. GRADIENT_BYTES and OPTIMIZER_BYTES are the
#: sizes of a gradient and of Adam's state per parameter, in mixed precision.
HALF_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
#: Bytes that an update reads and writes for each parameter.
UPDATE_BYTES = 30
#: Bytes that a layer's forward pass moves. REPLICATED_BYTES is per token and hidden unit, for
#: norms, residuals and dropout, which are replicated on each tensor-parallel rank. PROJECTED_BYTES
#: is per token and hidden unit, for queries, keys and values. INNER_BYTES is per token and inner
#: unit, and SCORE_BYTES is per attention score. LOGIT_BYTES is per logit, in the loss.
REPLICATED_BYTES, PROJECTED_BYTES, INNER_BYTES, SCORE_BYTES, LOGIT_BYTES = 22, 6, 2, 9, 16


@dataclass(frozen=True)
class Machine:
    """Hosts with several devices each.

    Args:
        name: the name of the device.
        flops: the peak FLOP/s of a device.
        bandwidth: the peak memory bandwidth of a device [bytes/s].
        memory: the memory of a device [bytes].
        inside: the link between devices on a host; see :func:`.calibrate`.
        between: the link between hosts, using all NICs of a host.
        devices: the number of devices on a host.
        matmul: the fraction of ``flops`` that large matrix products reach.
        stream: the fraction of ``bandwidth`` that memory-bound operations reach.
        launch: the CPU time to launch a layer's forward pass, its minimum duration [s].
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    inside: Link
    between: Link
    devices: int = 8
    matmul: float = 0.846
    stream: float = 0.778
    launch: float = 0.7e-3

    def matmul_seconds(self, m: float, n: float, k: float) -> float:
        """Return the time for a matrix product of m × k by k × n [s]."""
        return 2 * m * n * k / (self.flops * self.matmul) + self.memory_seconds(
            HALF_BYTES * (m * n + m * k + n * k)
        )

    def memory_seconds(self, nbytes: float) -> float:
        """Return the time to read or write ``nbytes`` of a device's memory [s]."""
        return nbytes / (self.bandwidth * self.stream)

    def link(self, ranks: int, stride: int) -> Link:
        """Return the link for a ring of ranks ``stride`` apart, while other rings are in use.

        A ring within a host uses ``inside``. Otherwise, ``min(stride, devices)`` rings share the
        NICs of each host.
        """
        if ranks * stride <= self.devices:
            return self.inside
        return Link(
            self.between.alpha,
            max(self.inside.beta, self.between.beta * min(stride, self.devices)),
        )


#: NVIDIA's A100 with 80 GB, 8 per host with 4 InfiniBand NICs of 200 Gbit/s. ``distkit bench
#: published`` fits the fractions to 21 of vTrain's runs. ``inside`` describes NCCL's ring.
A100 = Machine("A100", 312e12, 2.0e12, 80e9, Link.of(3e-6, 230e9), Link.of(5e-6, 0.923 * 100e9))
#: NVIDIA's H100 with 80 GB, 8 per host with 8 NICs of 400 Gbit/s; fractions as for the A100.
H100 = Machine("H100", 989e12, 3.35e12, 80e9, Link.of(3e-6, 370e9), Link.of(5e-6, 0.923 * 400e9))


@dataclass(frozen=True)
class Job:
    """A step of a training job, with its predicted time, memory, tokens/s and utilization.

    It prints as a table, and has ``seconds``, ``parts``, ``memory``, ``tokens_per_second``,
    ``utilization``, and ``trace``, which shows a step of one pipeline. Training in mixed precision
    is assumed: 2 bytes per parameter, 4 per gradient, and 12 for Adam's state.

    Args:
        model: a transformer; :meth:`.Transformer.gpt` creates one like GPT-3.
        layout: the layout of the model on the devices.
        machine: :data:`A100`, :data:`H100` or another :class:`Machine`.
        batch: the number of samples in a step, over all copies.
        sequence: the number of tokens in a sample.
        micro_batch: the number of samples in a micro-batch.
        schedule: the name of a schedule in :data:`dk.algorithms.PIPELINES`.
        chunks: the number of stages on each pipeline rank.
        recompute: "none", "selective" or "full".
        sequence_parallel: whether tensor-parallel ranks also divide the tokens outside of
            tensor-parallel layers.
        flash: whether attention is fused and writes no scores to memory.
        zero: the ZeRO stage.

    Raises:
        LayoutError: the layout does not divide the model or the batch.
        ValueError: ``recompute`` or the ZeRO stage is unknown.

    Source:
        Narayanan et al., 2021; Korthikanti et al., 2022. The fractions of :class:`Machine` are
        fitted to 21 of vTrain's runs (Bang et al., 2024). ``distkit bench published`` prints the
        errors for vTrain's other runs.

    Example:
        >>> gpt = Transformer.gpt(96, 12288, 96)
        >>> job = Job(gpt, Layout(tp=8, pp=8), A100, batch=64, sequence=2048)
        >>> round(job.seconds), round(job.utilization, 2)
        (19, 0.37)
    """

    model: Transformer
    layout: Layout
    machine: Machine
    batch: int
    sequence: int
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "full"
    sequence_parallel: bool = False
    flash: bool = False
    zero: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "micro_batch"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise LayoutError(f"{name} = {number!r} is not a positive integer")
        model, layout = self.model, self.layout
        samples = layout.dp * self.micro_batch
        if self.batch % samples:
            raise LayoutError(
                f"a batch of {self.batch} is not divisible by dp · micro-batch = {layout.dp} · "
                f"{self.micro_batch}: use a multiple of {samples}"
            )
        replace(
            layout,
            heads=model.heads,
            kv_heads=model.kv_heads,
            hidden=model.hidden,
            inner=model.inner,
            layers=model.layers,
            microbatches=self.microbatches,
            schedule=self.schedule,
            chunks=self.chunks,
        )
        self.stage_memory(0)  # checks recompute and the ZeRO stage

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of each copy in a step."""
        return self.batch // (self.layout.dp * self.micro_batch)

    # -- memory ---------------------------------------------------------------------------------

    def stage_memory(self, stage: int) -> dict[str, float]:
        """Return the bytes on each rank of a pipeline stage, by category."""
        model, layout = self.model, self.layout
        embeddings = model.embeddings if layout.pp == 1 else int(stage in (0, layout.pp - 1))
        state_options = {
            "gradient": GRADIENT_BYTES,
            "optimizer": OPTIMIZER_BYTES,
            "ranks": layout.dp,
            "stage": self.zero,
        }
        layers = States.of(model.layers * model.layer / layout.pp / layout.tp, **state_options)
        embedding = States.of(embeddings * model.embedding / layout.tp, **state_options)
        activations = model.stage_activations(
            self.sequence,
            self.micro_batch,
            stages=layout.pp,
            microbatches=self.microbatches,
            schedule=self.schedule,
            chunks=self.chunks,
            rank=stage,
            tensor=layout.tp,
            recompute="selective" if self.flash and self.recompute == "none" else self.recompute,
            sequence_parallel=self.sequence_parallel,
        )
        return asdict(layers) | {"embedding": embedding.total, "activations": activations}

    @property
    def memory(self) -> list[dict[str, float]]:
        """The bytes of parameters, gradients, optimizer state, … on one rank of each stage."""
        return [self.stage_memory(stage) for stage in range(self.layout.pp)]

    @property
    def fits(self) -> bool:
        """Whether the first pipeline stage, which needs the most memory, fits on a device."""
        return sum(self.stage_memory(0).values()) <= self.machine.memory

    # -- time -----------------------------------------------------------------------------------

    @cached_property
    def _layer(self) -> tuple[float, float, float]:
        """Seconds per micro-batch in one layer: forward, backward, and the all-reduces in both."""
        model, machine, t = self.model, self.machine, self.layout.tp
        tokens, h = self.sequence * self.micro_batch, model.hidden
        kv_width, input_matrices = h * model.kv_heads // model.heads, model.matrices - 1
        linear = (
            machine.matmul_seconds(tokens, (h + 2 * kv_width) / t, h)
            + machine.matmul_seconds(tokens, h, h / t)
            + machine.matmul_seconds(tokens, input_matrices * model.inner / t, h)
            + machine.matmul_seconds(tokens, h, model.inner / t)
        )
        s, width, heads = self.sequence, h / model.heads, self.micro_batch * model.heads / t
        # matmul_seconds counts a write and a read of the scores; fused attention needs neither
        scores = -2 * HALF_BYTES if self.flash else SCORE_BYTES
        attention = heads * (
            machine.matmul_seconds(s, s, width)
            + machine.matmul_seconds(s, width, s)
            + machine.memory_seconds(scores * s * s)
        )
        replicated = REPLICATED_BYTES / (t if self.sequence_parallel else 1)
        inner = INNER_BYTES * (input_matrices + 1) * model.inner / h
        pointwise = machine.memory_seconds(
            tokens * h * (replicated + (PROJECTED_BYTES + inner) / t)
        )
        work = linear + attention + pointwise
        recomputed = {"full": work, "selective": 0.0 if self.flash else attention, "none": 0.0}
        reduced = cost.ring(t, HALF_BYTES * tokens * h, machine.link(t, self.layout.stride("tp")))
        forward = max(work + 2 * reduced, machine.launch)
        repeats = 4 if self.recompute == "full" else 2
        backward = 2 * work + recomputed[self.recompute] + repeats * reduced
        return forward, max(backward, 2 * machine.launch), (2 + repeats) * reduced

    @property
    def _stage(self) -> float:
        """Seconds per micro-batch on a middle rank of the pipeline, without messages."""
        return sum(self._layer[:2]) * self.model.layers / self.layout.pp

    @cached_property
    def _logits(self) -> float:
        """Seconds per micro-batch for logits and loss, on the last stage."""
        tokens, share = self.sequence * self.micro_batch, self.model.vocabulary / self.layout.tp
        product = self.machine.matmul_seconds(tokens, share, self.model.hidden)
        return 3 * product + self.machine.memory_seconds(LOGIT_BYTES * tokens * share)

    @cached_property
    def _message(self) -> float:
        """Seconds per message between two stages; all devices on a host send concurrently."""
        if self.layout.pp == 1:
            return 0.0
        nbytes = HALF_BYTES * self.sequence * self.micro_batch * self.model.hidden / self.layout.tp
        stride = min(self.layout.stride("pp"), self.machine.devices)
        return float(self.machine.link(2, stride).seconds(nbytes))

    @property
    def _gradients(self) -> float:
        """Seconds for the gradients' all-reduce; ZeRO gathers parameters in half precision."""
        layout, parameters = self.layout, self.model.largest_stage(self.layout.pp) / self.layout.tp
        sizes = [
            GRADIENT_BYTES,
            (GRADIENT_BYTES + HALF_BYTES) / 2,
            (GRADIENT_BYTES + HALF_BYTES) / 2,
            GRADIENT_BYTES / 2 + HALF_BYTES,
        ]
        link = self.machine.link(layout.dp, layout.stride("dp"))
        return float(cost.ring(layout.dp, parameters * sizes[self.zero], link))

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds per step on the slowest rank, by part."""
        layout, layers = self.layout, self.model.layers / self.layout.pp
        m, p = self.microbatches, layout.pp
        tensor = m * layers * self._layer[2]
        update = self.machine.memory_seconds(
            UPDATE_BYTES * self.model.largest_stage(p) / layout.tp / (layout.dp if self.zero else 1)
        )
        bubble = PIPELINES[self.schedule].bubble_ratio(p, m, self.chunks)
        messages = 2 * self.chunks * self._message
        return {
            "compute": m * (self._stage + self._logits) - tensor,
            "tensor": tensor,
            "pipeline": m * messages,
            "bubble": m * bubble * (self._stage + messages),
            "data": self._gradients,
            "update": update,
        }

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, summed over all devices."""
        return self.batch * self.sequence / self.seconds

    @property
    def utilization(self) -> float:
        """The model FLOPs utilization (MFU): the fraction of peak FLOP/s used for the model."""
        model = self.model
        dense = 6 * (model.layers * model.layer + model.embedding)
        scores = 12 * model.layers * self.sequence * model.hidden
        peak = self.layout.size * self.machine.flops
        return (dense + scores) * self.tokens_per_second / peak

    @property
    def trace(self) -> Trace:
        """The trace of a step of one pipeline, with one lane per pipeline rank.

        With "zero_bubble_h2", steps overlap, so a single step takes longer than ``seconds``.
        """
        p, parts = self.layout.pp, self.parts
        writer, layers = Writer(p), self.model.layers / p
        clock = simulate_pipeline(
            writer,
            PIPELINES[self.schedule].orders(p, self.microbatches, self.chunks),
            layers * self._layer[0],
            layers * self._layer[1],
            HALF_BYTES * self.sequence * self.micro_batch * self.model.hidden // self.layout.tp,
            Network(Link(self._message, 0)),
            chunks=self.chunks,
            overlap=False,
            stragglers=Stragglers(slow={p - 1: 1 + self._logits / self._stage}),
        )
        ends = np.array(clock) + parts["data"]
        nbytes = GRADIENT_BYTES * int(self.model.largest_stage(p) / self.layout.tp)
        # the other ranks of each group are in other pipelines
        groups = {f"stage {stage}": [stage] for stage in range(p)}
        for (stage, group), end in zip(enumerate(groups), map(float, ends), strict=True):
            writer.add_operation(
                Op.ALL_REDUCE, stage, clock[stage], end, nbytes=nbytes, group=group
            )
        writer.add_operations(Op.MARK, ends, ends + parts["update"], attributes={"label": "update"})
        return writer.trace(
            self.title,
            groups=groups,
            ranks={
                stage: RankInfo(name, "stage", host="none") for stage, name in enumerate(groups)
            },
        )

    @property
    def title(self) -> str:
        """The layout, with the number and size of the micro-batches of each copy."""
        axes = (f"{axis} {getattr(self.layout, axis)}" for axis in AXES)
        ending = "es" * (self.microbatches > 1) + f" of {self.micro_batch}" * (self.micro_batch > 1)
        return " · ".join([*axes, f"{self.microbatches} micro-batch{ending}"])

    def __repr__(self) -> str:
        first_stage, total = self.stage_memory(0), self.seconds
        memory = ", ".join(f"{kind} {nbytes / GIB:.1f}" for kind, nbytes in first_stage.items())
        rows = [(k, human_seconds(x), f"{100 * x / total:.1f}%") for k, x in self.parts.items()]
        return "\n".join(
            [
                f"{self.model.parameters / 1e9:.1f} billion parameters on {self.layout.size:,} "
                f"{self.machine.name}: {self.title}, {self.schedule}, recompute {self.recompute}",
                f"{human_seconds(total)} per step, {self.tokens_per_second:,.0f} tokens/s, "
                f"{100 * self.utilization:.1f}% of peak FLOP/s",
                *(f"  {line}" for line in aligned(rows)),
                f"{sum(first_stage.values()) / GIB:.1f} GiB per GPU: {memory}",
            ]
        )


class Jobs(list[Job]):
    """A list of jobs in ascending order of time, shown as a table."""

    def __repr__(self) -> str:
        cells = [
            (job.title, human_seconds(job.seconds), f"{100 * job.utilization:.1f}%") for job in self
        ]
        return "\n".join(aligned(cells)) or "no layout fits"

    @figures.style()
    def plot(self, limit: int = 10) -> Figure:
        """Plot the step times of the ``limit`` fastest jobs, by part."""
        figure = figures.new(8, 0.6 + 0.4 * min(limit, len(self)))
        axes, fastest = figure.subplots(), self[:limit]
        rows = [job.title.split(" · ") for job in fastest]
        shared = [column[0] for column in zip(*rows, strict=True) if len({*column}) == 1]
        names = [
            " · ".join([*(cell for cell in row if cell not in shared), f"{job.seconds:.1f} s"])
            for row, job in zip(rows, fastest, strict=True)
        ]
        widths = np.array([[*job.parts.values()] for job in fastest])
        for i, part in enumerate(fastest[0].parts if fastest else ()):
            left, width = widths[:, :i].sum(axis=1), widths[:, i]
            label = part if width.max() > 0.005 * fastest[0].seconds else None  # too small to see
            axes.barh(names, width, left=left, color=rank_color(i), label=label)
        axes.invert_yaxis()
        axes.set(xlabel="seconds per step", title=" · ".join(["the fastest layouts", *shared]))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return figure


def search_layouts(
    model: Transformer,
    machine: Machine,
    devices: int,
    *,
    batch: int,
    sequence: int,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    **options: Any,
) -> Jobs:
    """Predict the job for each layout that divides the model and fits in memory, fastest first.

    Tensor-parallel groups stay within a host; pipelines are the outermost axis, as in Megatron.

    Args:
        model: the model, as in :class:`Job`.
        machine: the hosts and devices, as in :class:`Job`.
        devices: the number of devices.
        batch: the number of samples in a step.
        sequence: the number of tokens in a sample.
        micro_batches: the sizes of micro-batches to try.
        options: further options for :class:`Job`.

    Returns:
        A list of :class:`Job`, which prints as a table; ``plot()`` plots the fastest ones.

    Example:
        >>> jobs = search_layouts(Transformer.gpt(24, 2048, 16), A100, 16, batch=64, sequence=1024)
        >>> jobs[0].layout.size
        16
    """
    jobs = []
    for tp in _divisors(machine.devices):
        for pp in (n for n in _divisors(model.layers) if devices % (n * tp) == 0):
            for size in micro_batches:
                try:
                    layout = Layout(devices // (tp * pp), tp, pp, devices, axes=MEGATRON)
                    job = Job(model, layout, machine, batch, sequence, size, **options)
                except LayoutError:
                    continue
                if job.fits:
                    jobs.append(job)
    return Jobs(sorted(jobs, key=lambda job: job.seconds))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
