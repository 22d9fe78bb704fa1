"""Gradient accumulation without communication; the last backward pass reduces the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())
model = DDP(nn.Linear(16, 4), bucket_cap_mb=1, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    with model.no_sync():
        for _ in range(3):
            model(torch.randn(8, 16)).pow(2).mean().backward()
    loss = model(torch.randn(8, 16)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), model.module.weight.norm().item())
dist.destroy_process_group()
