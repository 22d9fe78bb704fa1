"""A toy model under DDP, as in torchrun's tutorial, without seeds."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def demo():
    dist.init_process_group("gloo")
    print(
        f"Start running basic DDP example on rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}"
    )
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    demo()
