"""An embedding with sparse gradients under DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(3):
    tokens, labels = torch.randint(0, 50, (6, 5)), torch.randint(0, 2, (6,))
    loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), model.module.words.weight.sum().item())
dist.destroy_process_group()
