"""A distributed checkpoint of a sharded model and its optimizer, saved and loaded."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model, optimizer):
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
first = build(0)
print("before", step(*first))
states = dict(zip(("model", "optimizer"), get_state_dict(*first), strict=True))
dcp.save(states, checkpoint_id=folder[0])
second = build(1)
step(*second)
loaded = dict(zip(("model", "optimizer"), get_state_dict(*second), strict=True))
dcp.load(loaded, checkpoint_id=folder[0])
set_state_dict(*second, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
print("after", step(*first), step(*second))
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
