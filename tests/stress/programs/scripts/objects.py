"""Python objects instead of tensors, and a barrier that names late ranks."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
settings = [{"lr": 0.1, "layers": [1, 2, 3]}] if rank == 0 else [None]
dist.broadcast_object_list(settings, src=0)
print("settings", settings[0])
names = [None] * size
dist.all_gather_object(names, f"rank-{rank}")
print("names", names)
gathered = [None] * size if rank == 0 else None
dist.gather_object({"rank": rank}, gathered, dst=0)
print("gathered", gathered)
mine = [None]
dist.scatter_object_list(mine, [("task", r) for r in range(size)] if rank == 0 else None, src=0)
print("task", mine[0])
dist.monitored_barrier()
dist.destroy_process_group()
