"""An MLP with a column-parallel and a row-parallel layer, compared with the unsharded model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
single = MLP()
torch.manual_seed(0)
model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
ours = torch.optim.SGD(model.parameters(), lr=0.1)
reference = torch.optim.SGD(single.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 10)
    loss, expected = model(x).pow(2).mean(), single(x).pow(2).mean()
    for value, optimizer in ((loss, ours), (expected, reference)):
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item(), "as single", torch.allclose(loss, expected, atol=1e-6))
dist.destroy_process_group()
