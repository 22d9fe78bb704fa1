"""A branch that only some ranks take, with find_unused_parameters; then a static graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, left):
        return (self.left if left else self.right)(self.stem(x))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(Branches(), find_unused_parameters=True)
for step in range(3):
    loss = model(torch.randn(5, 4), left=(step + rank) % 2 == 0).mean()
    loss.backward()
    print("unused", loss.item(), model.module.stem.weight.grad.sum().item())
static = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), static_graph=True)
for _ in range(2):
    loss = static(torch.randn(5, 4)).mean()
    loss.backward()
    print("static", loss.item())
dist.destroy_process_group()
