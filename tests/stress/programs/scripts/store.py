"""The key-value store of the rendezvous: counters, waiting for keys, prefixes."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
store.set(f"value-{rank}", str(rank * rank))
store.wait([f"value-{r}" for r in range(size)])
print("values", [int(store.get(f"value-{r}")) for r in range(size)])
store.add("arrived", 1)
while store.add("arrived", 0) < size:
    pass
print("all", store.add("arrived", 0))
dist.barrier()
dist.destroy_process_group()
