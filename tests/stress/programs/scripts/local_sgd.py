"""Ranks train independently, and average their models every few steps."""

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
averager = averagers.PeriodicModelAverager(period=4, warmup_steps=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for step in range(12):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
    print(step, loss.item(), model.weight.sum().item())
dist.destroy_process_group()
