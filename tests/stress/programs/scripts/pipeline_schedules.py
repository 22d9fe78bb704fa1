"""torch's pipelines: GPipe and 1F1B over stages of a small network."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(dist.get_world_size())]


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for kind in (ScheduleGPipe, Schedule1F1B):
    mine = layers()[rank]
    stage = PipelineStage(mine, rank, size, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    torch.manual_seed(1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for _ in range(2):
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, src=size - 1)
        print(kind.__name__, loss.item())
dist.destroy_process_group()
