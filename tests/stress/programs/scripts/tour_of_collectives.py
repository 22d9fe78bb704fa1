"""Calls every collective once; adapted from PyTorch's "Writing distributed applications"."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

x = torch.full((4,), rank + 1.0)
dist.all_reduce(x, op=dist.ReduceOp.SUM)
print("all_reduce", x.tolist())

y = torch.arange(3.0) if rank == 1 else torch.zeros(3)
dist.broadcast(y, src=1)
print("broadcast", y.tolist())

z = torch.full((2,), float(rank))
dist.reduce(z, dst=0, op=dist.ReduceOp.MAX)
if rank == 0:
    print("reduce", z.tolist())

parts = [torch.zeros(1) for _ in range(size)]
dist.all_gather(parts, torch.tensor([rank * 10.0]))
print("all_gather", [p.item() for p in parts])

mine = torch.zeros(2)
pieces = [torch.full((2,), 100.0 + r) for r in range(size)] if rank == 0 else None
dist.scatter(mine, pieces, src=0)
print("scatter", mine.tolist())

gathered = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
dist.gather(mine, gathered, dst=0)
if gathered is not None:
    print("gather", torch.stack(gathered).sum().item())

piece = torch.zeros(1)
dist.reduce_scatter(piece, [torch.tensor([float(r + rank)]) for r in range(size)])
print("reduce_scatter", piece.item())

out = torch.empty(size)
dist.all_to_all_single(out, torch.arange(size) + 10.0 * rank)
print("all_to_all", out.tolist())
dist.barrier()
dist.destroy_process_group()
