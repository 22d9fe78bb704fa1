"""Metrics over all ranks, under no_grad and inference_mode, with each sample counted once."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, x = torch.nn.Linear(5, 3), torch.randn(103, 5)
y = torch.randint(0, 3, (103,))
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        mine = range(rank, 103, size)
        counts = torch.zeros(2, dtype=torch.long)
        for i in mine:
            counts += torch.tensor([int(model(x[i]).argmax() == y[i]), 1])
        dist.all_reduce(counts)
        print(mode.__name__, counts.tolist())
dist.destroy_process_group()
