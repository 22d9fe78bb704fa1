"""DDP's communication hooks: compressed gradients, PowerSGD, and a custom one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def halved(state, bucket):
    future = dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def powersgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


HOOKS = {
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "powersgd": powersgd,
    "own": lambda: (None, halved),
}

dist.init_process_group("gloo")
for name, hook in HOOKS.items():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))
    model.register_comm_hook(*hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        loss = model(torch.randn(16, 32)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(name, loss.item(), model.module[0].weight.sum().item())
dist.destroy_process_group()
