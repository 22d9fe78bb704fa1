"""Groups within and across nodes of two, a hierarchical all-reduce, and a split communicator."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
within, _ = dist.new_subgroups(group_size=2)
across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
x = torch.tensor([float(rank)])
dist.all_reduce(x, group=within)
dist.all_reduce(x, group=across)
print("hierarchical", x.item())
leaders = dist.new_group([0, 2])
if rank in (0, 2):
    y = torch.tensor([float(rank)])
    dist.broadcast(y, src=2, group=leaders)
    print("leaders", y.item(), dist.get_group_rank(leaders, rank))
reversed_ranks = dist.new_group([3, 1], use_local_synchronization=False)
if rank in (1, 3):
    z = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(z, torch.tensor([float(rank)]), group=reversed_ranks)
    print("pair", [t.item() for t in z])
dist.barrier()
dist.destroy_process_group()
