"""ZeroRedundancyOptimizer trains like Adam; its state is consolidated on rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(zero):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]))
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(8, 32)), torch.randn(8, 32)).backward()
        optimizer.step()
    if zero:
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            print("states", len(optimizer.state_dict()["state"]))
    print(zero, sum(p.sum().item() for p in model.parameters()))


dist.init_process_group("gloo")
train(zero=False)
train(zero=True)
dist.destroy_process_group()
