"""An all-reduce made of sends and receives, compared with torch's."""

import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(x.chunk(size))
    left, right = (rank - 1) % size, (rank + 1) % size
    buffer = torch.empty_like(chunks[0])
    for step in range(size - 1):
        request = dist.isend(chunks[(rank - step) % size].clone(), right)
        dist.recv(buffer, left)
        chunks[(rank - step - 1) % size] += buffer
        request.wait()
    for step in range(size - 1):
        request = dist.isend(chunks[(rank - step + 1) % size].clone(), right)
        dist.recv(buffer, left)
        chunks[(rank - step) % size].copy_(buffer)
        request.wait()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
mine = torch.randn(8 * dist.get_world_size(), dtype=torch.float64)
theirs = mine.clone()
ring_all_reduce(mine)
dist.all_reduce(theirs)
print("equal", torch.allclose(mine, theirs), mine.sum().item())
dist.destroy_process_group()
