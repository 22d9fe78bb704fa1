"""Functional collectives, and the differentiable collectives of torch.distributed.nn."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD
x = torch.full((4,), rank + 1.0)
print("all_reduce", collectives.all_reduce(x, "sum", world).tolist(), x.tolist())
print("all_gather", collectives.all_gather_tensor(x[:1], 0, world).tolist())
whole = torch.arange(2.0 * size) * (rank + 1)
print("reduce_scatter", collectives.reduce_scatter_tensor(whole, "sum", 0, world).tolist())
print("broadcast", collectives.broadcast(x, 1, world).tolist())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.nn as differentiable

    y = torch.full((1,), rank + 1.0, requires_grad=True)
    total = differentiable.all_reduce(y * y)
    total.sum().backward()
    print("differentiable", total.item(), y.grad.item())
dist.destroy_process_group()
