"""Records the gradients, weights and loss of training steps on each replica.

Marks contain summaries of values, never whole tensors.

===================  ==============================  ============================================
attributes           before (STARTED)                after (COMPLETED)
===================  ==============================  ============================================
``gradient NAME``    this rank's own gradient        the gradient that the optimizer saw
``reference NAME``                                   the gradient that ``reference`` computes
``weights CRC``                                      sketch of all weights, norms of the largest
``step``                                             loss, learning rate, samples (NaN: unknown)
===================  ==============================  ============================================

The gradients of a step precede its ``step`` mark, and the updated weights follow it. Equal CRCs
mean bitwise identical weights (of a sample, for large models). The norm of the difference between
two sketches estimates the norm of the difference between the weights, to within about 20%.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from distkit.events import Op, State
from distkit.recording import recorder
from distkit.recording.recorder import VALUES, Recorder, user_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distkit.recording.encoding import Values

#: Number of initial steps whose gradients and weights are all recorded; from then on, the interval
#: between recorded steps doubles whenever the step number does.
ALL_STEPS = 64
#: Maximum number of elements that a sketch reads; larger models are sampled.
EXACT_WEIGHTS = 1 << 22


@contextmanager
def watch_gradients(model: nn.Module, *, max_parameters: int = 32) -> Iterator[GradientRecorder]:
    """Record gradients, weights and loss of a training loop, for :class:`distkit.Gradients`.

    Each gradient is recorded as soon as ``backward`` has computed it, before any all-reduce, and
    again at the end of the step. This works with custom loops, with
    :func:`~distkit.algorithms.sync_sgd_step` and with ``DistributedDataParallel``. To keep the
    trace small, the gradients and weights of only some steps are recorded, the same on all ranks:
    the first 64 steps, then every second step, later every fourth step, and so on. Outside a
    recorded run, this does nothing.

    Args:
        model: the model to train.
        max_parameters: the maximum number of parameters to record; the largest are recorded.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> with watch_gradients(net) as watch:
    ...     for x in torch.ones(3, 5, 2):
    ...         loss = net(x).mean()
    ...         loss.backward()
    ...         watch.step(loss=loss, lr=0.1, samples=5)
    """
    watch = GradientRecorder(_unwrap(model), max_parameters)
    try:
        yield watch
    finally:
        for hook in watch.hooks:
            hook.remove()


class GradientRecorder:
    """The object that :func:`watch_gradients` yields; call :meth:`step` after each step."""

    def __init__(self, model: nn.Module, max_parameters: int) -> None:
        parameters = [(n, w) for n, w in model.named_parameters() if w.requires_grad]
        largest = {n for n, _ in sorted(parameters, key=lambda p: -p[1].numel())[:max_parameters]}
        self._watched = {n: w for n, w in parameters if n in largest}
        self._weights = [w for _, w in parameters]
        self._steps = 0
        self._open: dict[str, int] = {}  # seq of each gradient's mark
        self.hooks = [
            w.register_post_accumulate_grad_hook(partial(self._record_local, n))
            for n, w in self._watched.items()
        ]
        self._record_weights()

    def step(
        self, *, loss: Tensor | float = math.nan, lr: float = math.nan, samples: int | None = None
    ) -> None:
        """Record the end of a step: the current gradients, the updated weights, and the arguments.

        Args:
            loss: this rank's mean loss.
            lr: the learning rate.
            samples: the number of examples that this rank has used in this step.
        """
        rec = recorder.current()
        if rec is None:
            return
        for name, w in self._watched.items():
            if name in self._open and w.grad is not None:
                _put(rec, self._open[name], State.COMPLETED, "gradient", name, w.grad)
        self._open.clear()
        self._steps += 1
        value = float(loss if isinstance(loss, (int, float)) else loss.detach())
        values = value, float(lr), math.nan if samples is None else float(samples)
        rec.record(
            rec.next_seq(),
            Op.MARK,
            State.COMPLETED,
            attributes={"watched": "step"},
            where=user_line(2),
            # no statistics: the values are of different kinds
            summary=(values, math.nan, math.nan, math.nan, len(values), False),
        )
        self._record_weights()

    def reference(self, loss: Tensor) -> None:
        """Record the reference gradient, which one process computes from the whole batch.

        Call this before the step changes the weights. The model's gradients stay unchanged.

        Args:
            loss: the mean loss over the examples of all ranks.
        """
        rec = recorder.current()
        if rec is None or not is_recorded_step(self._steps):
            return
        import torch

        gradients = torch.autograd.grad(loss, list(self._watched.values()), allow_unused=True)
        for name, gradient in zip(self._watched, gradients, strict=True):
            if gradient is not None:
                _put(rec, rec.next_seq(), State.COMPLETED, "reference", name, gradient)

    def _record_local(self, name: str, w: Tensor) -> None:
        """Record this rank's gradient of a parameter, before any all-reduce."""
        rec = recorder.current()
        if rec is not None and w.grad is not None and is_recorded_step(self._steps):
            seq = self._open.setdefault(name, rec.next_seq())
            _put(rec, seq, State.STARTED, "gradient", name, w.grad)

    def _record_weights(self) -> None:
        rec = recorder.current()
        if rec is not None and self._weights and is_recorded_step(self._steps):
            crc, summary = sketch(self._weights)
            names = {} if self._steps else {"layers": tuple(self._watched)}
            rec.record(
                rec.next_seq(),
                Op.MARK,
                State.COMPLETED,
                attributes={
                    "watched": "weights",
                    "checksum": f"{crc:08x}",
                    "norms": _norms(list(self._watched.values())),
                    **names,
                },
                where=user_line(3),
                summary=summary,
            )


def is_recorded_step(step: int) -> bool:
    """Return whether the gradients and weights of a step, counted from 0, are recorded.

    >>> [is_recorded_step(n) for n in (0, 63, 64, 65, 130, 132)]
    [True, True, True, False, False, True]
    """
    return step < ALL_STEPS or step % (1 << (step // ALL_STEPS).bit_length()) == 0


def sketch(tensors: Sequence[Tensor]) -> tuple[int, Values]:
    """Return a checksum and a sketch of the tensors' elements.

    The sketch contains 64 sums of the elements with random signs. Two sketches differ, in Euclidean
    norm, about as much as the tensors do. Tensors with more than 4,194,304 elements in total are
    sampled. Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002.
    """
    import numpy as np
    import torch

    size = sum(t.numel() for t in tensors)
    stride = -(-size // EXACT_WEIGHTS)
    parts = [t.detach().reshape(-1)[::stride].cpu() for t in tensors]
    flat: Any = torch.cat([t if t.dtype == torch.float64 else t.float() for t in parts]).numpy()
    padded = np.zeros(-(-len(flat) // VALUES) * VALUES)
    padded[: len(flat)] = flat
    with np.errstate(all="ignore"):  # for a diverging model
        sums = (padded * _signs(len(padded))).reshape(-1, VALUES).sum(0) * math.sqrt(stride)
        norm = math.sqrt(stride) * float(np.linalg.norm(flat))
    summary = (tuple(sums.tolist()), norm, float(flat.min()), float(flat.max()), size, stride > 1)
    return zlib.crc32(flat.data), summary


@lru_cache(4)
def _signs(size: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, 2, size, dtype=np.int8) * np.int8(2) - np.int8(1)


def _norms(tensors: list[Tensor]) -> tuple[float, ...]:
    """Return the norm of each tensor, or -1 for NaN and infinity, which JSON cannot represent."""
    import torch

    norms = torch._foreach_norm([t.detach() for t in tensors])
    return tuple(n if math.isfinite(n) else -1.0 for n in map(float, norms))


def _put(rec: Recorder, seq: int, state: State, kind: str, name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:  # the gradient of an embedding
        gradient = gradient.to_dense()
    rec.record(
        seq,
        Op.MARK,
        state,
        attributes={"watched": kind, "name": name},
        where=user_line(3),
        nbytes=gradient.nbytes,
        shape=tuple(gradient.shape),
        dtype=str(gradient.dtype)[6:],
        summary=recorder.summarize(gradient),
    )


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, for its parameter names."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model
