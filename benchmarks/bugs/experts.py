"""Parts of a model that some ranks use and others do not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bugs.catalogue import Experts, bug, ddp, ones, rank, rows
from distkit.diagnosis.findings import Kind

UNUSED = Kind.UNUSED_PARAMETER
FIND = "find_unused_parameters"


@bug(UNUSED, (1,), (FIND, "experts.1"), "deepspeedai/DeepSpeed#5066")
def an_expert_without_tokens() -> None:
    """No token of rank 1 goes to the second expert."""
    net = ddp(Experts())
    chosen = (0,) if rank() == 1 else (0, 1)
    net(ones(2, 4), *chosen).sum().backward()  # <-
    dist.barrier()  # <-


@bug(UNUSED, (2,), (FIND, "experts.0"), "ScienceOne-AI/DeepSeek-671B-SFT-Guide#7")
def an_expert_without_tokens_in_the_last_step() -> None:
    """All goes well for two steps; then rank 2 has no tokens for the first expert."""
    net = ddp(Experts())
    for step in range(3):
        chosen = (1,) if rank() == 2 and step == 2 else (0, 1)
        net.zero_grad()
        net(ones(2, 4), *chosen).sum().backward()  # <-


@bug(UNUSED, (0,), (FIND, "1."), "huggingface/accelerate#1191")
def a_layer_is_dropped() -> None:
    """Rank 0 draws another number, and drops a layer in this step."""

    class Droppable(torch.nn.Sequential):
        def forward(self, x: torch.Tensor, drop: bool = False) -> torch.Tensor:
            y: torch.Tensor = self[0](x)
            return y if drop else y + self[1](y)

    net = ddp(Droppable(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    net(ones(2, 4), rank() == 0).sum().backward()  # <-
    dist.all_reduce(ones(1))  # <-


@bug(UNUSED, (0, 1), FIND, "speechbrain/speechbrain#2340", ranks=2, how="fails")
def a_head_that_nobody_uses() -> None:
    """The second head gets no gradient on any rank: DDP complains in the next step."""
    net = ddp(Experts())
    for _ in range(2):
        net(ones(2, 4), 0).sum().backward()


@bug(UNUSED, (1,), FIND, "Lightning-AI/pytorch-lightning#5359", how="fails")
def a_branch_for_rare_data() -> None:
    """Rank 1's data goes through one branch only; its next forward complains."""
    net = ddp(Experts())
    for _ in range(2):
        chosen = (0,) if rank() == 1 else (0, 1)
        net(ones(2, 4), *chosen).sum().backward()


class _Reduced(torch.autograd.Function):
    """Passes on its input, and reduces its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


@bug((Kind.SKIPPED, Kind.UNEVEN), (1,), "autograd", "PaddlePaddle/PaddleFormers#3010")
def no_tokens_cut_the_graph() -> None:
    """Rank 1 received no tokens and returns a new tensor: its backward ends before the layer."""
    x = ones(4).requires_grad_()
    y = torch.zeros(4, requires_grad=True) if rank() == 1 else _Reduced.apply(x)  # type: ignore[no-untyped-call]
    y.sum().backward()


@bug((Kind.SKIPPED, Kind.UNEVEN), (2,), ("`if", "all_to_all"), "deepspeedai/DeepSpeed#5794")
def no_tokens_no_exchange() -> None:
    """Rank 2 has no tokens, and does not take part in the exchange."""
    tokens = ones(0 if rank() == 2 else 3)
    if tokens.numel():
        dist.all_to_all_single(torch.empty(3), tokens)  # <-


@bug(Kind.DIFFERENT_COLLECTIVE, (2,), "same", "deepspeedai/DeepSpeed#8478")
def the_norm_of_experts() -> None:
    """Rank 2 owns no expert and goes another way through gradient clipping."""
    norm = ones(1)
    if rank() == 2:
        dist.all_reduce(norm)  # <-
    else:
        dist.all_gather(rows(norm), norm)  # <-


@bug(Kind.UNEVEN, (1,), "same", "pytorch/pytorch#90171")
def a_parallel_layer_is_skipped() -> None:
    """Rank 1 drops a layer whose output the ranks reduce."""
    for layer in range(3):
        if rank() == 1 and layer == 1:
            continue
        dist.all_reduce(ones(4))  # <-
    dist.barrier()  # <-


@bug(
    (Kind.DIFFERENT_COLLECTIVE, Kind.DIFFERENT_TENSOR, Kind.SKIPPED),
    (1,),
    "`if",
    "pytorch/pytorch#90171",
)
def a_module_is_skipped() -> None:
    """Rank 1 skips the attention, and comes to the next layer's reduction first."""
    h = ones(8)
    for layer in range(2):
        if not (rank() == 1 and layer == 0):
            dist.all_reduce(h)  # <-
        dist.all_gather(rows(ones(2)), ones(2))


@bug(Kind.RAISED, (0, 1), "requires_grad", how="fails")
def frozen_on_one_rank() -> None:
    """Rank 1 has frozen a layer before the model is wrapped: DDP refuses."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    if rank() == 1:
        net[0].requires_grad_(False)
    ddp(net)
