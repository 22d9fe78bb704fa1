"""DTensors: distributed, redistributed, multiplied, and gathered."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
a, b = torch.randn(8, 6), torch.randn(6, 4)
rows = distribute_tensor(a, mesh, [Shard(0)])
columns = rows.redistribute(mesh, [Shard(1)])
whole = columns.redistribute(mesh, [Replicate()])
print("redistributed", torch.equal(whole.to_local(), a), columns.to_local().sum().item())
product = columns @ distribute_tensor(b, mesh, [Shard(0)])
print("partial", product.placements, torch.allclose(product.full_tensor(), a @ b, atol=1e-5))
local = DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, [Shard(0)])
print("sum", local.sum().full_tensor().item(), local.full_tensor().tolist())
dist.destroy_process_group()
