"""Ranks with different numbers of batches, under the Join context manager."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(3, 1))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
batches = [torch.full((2, 3), float(i + rank)) for i in range(5 + rank)]
count = 0
with Join([model, optimizer]):
    for batch in batches:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        count += 1
        print("loss", loss.item())
print(f"rank {rank} has exhausted all {count} of its inputs")
dist.destroy_process_group()
