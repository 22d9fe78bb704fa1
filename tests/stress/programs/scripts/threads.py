"""Each rank runs collectives on two groups from two threads."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group() for _ in range(2)]
results = {}


def reduce(i):
    x = torch.full((1000,), float(rank + i))
    for _ in range(3):
        dist.all_reduce(x, group=groups[i])
    results[i] = x.sum().item()


workers = [threading.Thread(target=reduce, args=(i,)) for i in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
for work in works:
    work.wait()
print(sorted(results.items()))
dist.destroy_process_group()
