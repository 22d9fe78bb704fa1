"""Tokens are sent to experts on other ranks and back, by all-to-all with uneven splits."""

import torch
import torch.distributed as dist
from torch import nn


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent):
        ctx.splits = received, sent
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, gradient):
        received, sent = ctx.splits
        out = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), sent, received)
        return out, None, None


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
router = nn.Linear(8, size)
torch.manual_seed(rank)
expert = nn.Linear(8, 8)
tokens = torch.randn(12, 8)
choice = router(tokens).argmax(1)
order = choice.argsort(stable=True)
sent = torch.bincount(choice, minlength=size)
received = torch.empty_like(sent)
dist.all_to_all_single(received, sent)
here = AllToAll.apply(tokens[order], received.tolist(), sent.tolist())
back = AllToAll.apply(expert(here), sent.tolist(), received.tolist())
loss = back.pow(2).mean()
loss.backward()
print("sent", sent.tolist(), "loss", loss.item())
print("gradient", expert.weight.grad.sum().item() if len(here) else 0.0)
dist.destroy_process_group()
