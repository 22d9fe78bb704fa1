"""The basic example from the DDP tutorial, with its setup and cleanup."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup():
    dist.init_process_group("gloo", init_method="env://")
    torch.manual_seed(int(os.environ["RANK"]))  # DDP makes the weights equal


def demo_basic():
    model = ToyModel()
    ddp = DDP(model)
    loss_fn, optimizer = nn.MSELoss(), torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_fn(ddp(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        print("loss", loss.item(), "weight", model.net1.weight.sum().item())


if __name__ == "__main__":
    setup()
    demo_basic()
    dist.destroy_process_group()
