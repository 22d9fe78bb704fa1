"""FSDP2: every block sharded, gradients clipped, the state gathered at the end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[Block(16) for _ in range(3)], nn.Linear(16, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), "norm", norm.full_tensor().item())
print("sum", sum(p.full_tensor().sum().item() for p in model.parameters()))
dist.destroy_process_group()
