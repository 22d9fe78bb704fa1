"""Training memory per rank, computed from formulas and measured in a process.

By default, a parameter and its gradient use 2 bytes each, and Adam's state for the parameter uses
8: two moments of 4 bytes. Published tables often write "GB" for :data:`GIB`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from distkit_parallel.schedules import PIPELINES

GIB = 2**30


@dataclass(frozen=True)
class States:
    """The model states of a rank: parameters, gradients and optimizer state [bytes]."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of all parts [bytes]."""
        return self.parameters + self.gradients + self.optimizer

    @classmethod
    def of(
        cls,
        parameters: float,
        *,
        ranks: int = 1,
        stage: int = 0,
        parameter: int = 2,
        gradient: int = 2,
        optimizer: int = 8,
    ) -> States:
        """Return a data-parallel rank's state; sharded parts are divided evenly among the ranks.

        Stage 1 shards the optimizer state, stage 2 also shards the gradients, and stage 3 the
        parameters as well; stage 0 is DDP, which shards nothing.

        Args:
            parameters: the number of parameters.
            ranks: the number of data-parallel ranks.
            stage: the ZeRO stage, from 0 to 3.
            parameter: bytes per parameter.
            gradient: bytes per gradient element.
            optimizer: bytes of optimizer state per parameter.

        Raises:
            ValueError: the stage is unknown, or the number of ranks is less than 1.

        Source:
            Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
            models", 2020.

        Example:
            >>> States.of(1e9, ranks=4, stage=1)
            States(parameters=2000000000.0, gradients=2000000000.0, optimizer=2000000000.0)
        """
        if not 0 <= stage <= 3 or ranks < 1:
            raise ValueError(
                f"ZeRO needs a stage from 0 to 3 and ranks ≥ 1; got {stage} and {ranks}"
            )
        sizes = (parameter, gradient, optimizer)
        sharded = (stage >= 3, stage >= 2, stage >= 1)
        return cls(
            *(
                parameters * size / (ranks if is_sharded else 1)
                for size, is_sharded in zip(sizes, sharded, strict=True)
            )
        )


@dataclass(frozen=True)
class Transformer:
    """The sizes and memory of a decoder like Llama.

    Args:
        layers: L, the number of layers.
        hidden: h, the width.
        heads: the number of query heads.
        kv_heads: the number of key and value heads.
        inner: the inner width of the feed-forward layer.
        vocabulary: the number of tokens.
        matrices: the number of matrices in the feed-forward layer; 2 if it is not gated.
        embeddings: the number of embeddings; 1 if input and output share one.

    Example:
        >>> LLAMA_3_8B.parameters
        8029995008
        >>> round(States.of(LLAMA_3_8B.parameters).optimizer / GIB, 3)
        59.828
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    matrices: int = 3
    embeddings: int = 2

    @classmethod
    def gpt(cls, layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Transformer:
        """Create a model like GPT-3, with one embedding and feed-forward layers of width 4h.

        >>> round(Transformer.gpt(96, 12288, 96).parameters / 1e9, 1)
        174.6
        """
        return cls(layers, hidden, heads, heads, 4 * hidden, vocabulary, 2, 1)

    @property
    def embedding(self) -> int:
        """The number of parameters in one embedding."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """The number of parameters in one layer, for attention and feed-forward."""
        h, kv_width = self.hidden, self.hidden * self.kv_heads // self.heads
        return 2 * h * h + 2 * h * kv_width + self.matrices * h * self.inner

    @property
    def parameters(self) -> int:
        """The number of parameters, without those of norms (less than 0.01%)."""
        return self.embeddings * self.embedding + self.layers * self.layer

    def activations(
        self,
        sequence: int,
        batch: int = 1,
        *,
        tensor: int = 1,
        recompute: str = "selective",
        sequence_parallel: bool = False,
    ) -> float:
        """Return the bytes that layers keep for the backward pass, on each tensor-parallel rank.

        With ``a`` attention heads, the bytes are these multiples of s·b·h·L:

        ===========  =====================  ==================
        recompute    tensor parallel        sequence parallel
        ===========  =====================  ==================
        "none"       10 + 24/t + 5as/(ht)   (34 + 5as/h)/t
        "selective"  10 + 24/t              34/t
        "full"       2                      2
        ===========  =====================  ==================

        "selective" recomputes attention scores in the backward pass, like FlashAttention; "full"
        keeps only each layer's input. Activations outside of the layers are not counted.

        Args:
            sequence: s, the number of tokens in a sample.
            batch: b, the number of samples in a micro-batch.
            tensor: t, the number of tensor-parallel ranks.
            recompute: "none", "selective" or "full".
            sequence_parallel: whether tensor-parallel ranks also divide the tokens outside of
                tensor-parallel layers.

        Raises:
            ValueError: ``recompute`` is unknown.

        Source:
            Korthikanti et al., "Reducing activation recomputation in large transformer models",
            2022, table 2.

        Example:
            >>> LLAMA_3_8B.activations(4096) / GIB
            17.0
            >>> LLAMA_3_8B.activations(4096, tensor=8, sequence_parallel=True) / GIB
            2.125
        """
        scores = 5 * self.heads * sequence / self.hidden
        divided, replicated = (34.0, 0.0) if sequence_parallel else (24.0, 10.0)
        factors = {
            "none": replicated + (divided + scores) / tensor,
            "selective": replicated + divided / tensor,
            "full": 2.0,
        }
        if recompute not in factors:
            raise ValueError(
                f"unknown recompute={recompute!r}: use {', '.join(map(repr, factors))}"
            )
        return factors[recompute] * sequence * batch * self.hidden * self.layers

    def largest_stage(self, stages: int) -> float:
        """Return the number of parameters in a pipeline's first stage, including its embedding.

        >>> round(2 * LLAMA_3_8B.largest_stage(8) / GIB, 4)
        2.6035
        """
        embeddings = self.embeddings if stages == 1 else 1
        return self.layers * self.layer / stages + embeddings * self.embedding

    def stage_activations(
        self,
        sequence: int,
        batch: int = 1,
        *,
        stages: int,
        microbatches: int,
        schedule: str = "1f1b",
        chunks: int = 1,
        rank: int = 0,
        **options: Any,
    ) -> float:
        """Return the bytes of activations on a pipeline rank, for all micro-batches in flight.

        With 1F1B, the first rank has one micro-batch per stage in flight, so pipelining does not
        reduce the activations on that rank. ``options`` are arguments of :meth:`activations`, such
        as ``tensor``.

        Example:
            >>> one_stage = LLAMA_3_8B.activations(1024)
            >>> LLAMA_3_8B.stage_activations(1024, stages=8, microbatches=32) == one_stage
            True
        """
        in_flight = PIPELINES[schedule].activations(rank, stages, microbatches, chunks)
        return self.activations(sequence, batch, **options) * in_flight / (stages * chunks)


#: Llama 3 with 8 billion parameters. Dubey et al., 2024.
LLAMA_3_8B = Transformer(32, 4096, 32, 8, 14336, 128256)


def tensor_bytes() -> int:
    """Return the total size of this process's tensors and gradients [bytes].

    Shared storage counts once. Tensors that only autograd references are not counted, so call this
    function after the backward pass.

    Example:
        >>> import torch
        >>> before = tensor_bytes()
        >>> x = torch.zeros(250, 4)
        >>> y = x.t()
        >>> tensor_bytes() - before
        4000
    """
    import torch

    types = (torch.Tensor, torch.nn.Parameter)  # a DTensor's local tensor is among these
    tensors = [obj for obj in gc.get_objects() if type(obj) in types]
    tensors += [t.grad for t in tensors if t.is_leaf and type(t.grad) in types]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.layout is torch.strided
    }
    return sum(storages.values())
