"""Rank 0 saves a checkpoint; all ranks wait, load it and continue."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
path = Path(folder[0], "model.checkpoint")
if rank == 0:
    torch.save(model.state_dict(), path)
dist.barrier()
model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
loss = model(torch.randn(20, 10)).pow(2).mean()
loss.backward()
print("loss", loss.item())
dist.barrier()
if rank == 0:
    path.unlink()
    path.parent.rmdir()
dist.destroy_process_group()
