"""Data, tensor and pipeline parallelism by hand, each with its own groups."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class Reduce(torch.autograd.Function):
    """Sum the partial results of a row-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Copy(torch.autograd.Function):
    """Sum the gradients of a column-parallel layer's input."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class ParallelMLP(nn.Module):
    def __init__(self, dim, group):
        super().__init__()
        self.group, share = group, 4 * dim // dist.get_world_size(group)
        self.up, self.down = nn.Linear(dim, share), nn.Linear(share, dim, bias=False)

    def forward(self, x):
        hidden = torch.relu(self.up(Copy.apply(x, self.group)))
        return x + Reduce.apply(self.down(hidden), self.group)


def groups(sizes):
    """Return this rank's group along each dimension; the last dimension varies fastest."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes)
    found = []
    for dimension, size in enumerate(sizes):
        for row in ranks.movedim(dimension, -1).reshape(-1, size).tolist():
            group = dist.new_group(row)
            if dist.get_rank() in row:
                mine = group, row
        found.append(mine)
    return found


def main():
    parser = argparse.ArgumentParser()
    for name in ("dp", "pp", "tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    (dp, dps), (pp, pps), (tp, tps) = groups((args.dp, args.pp, args.tp))
    stage, dim, micro = pps.index(dist.get_rank()), 8, 2
    torch.manual_seed(10 * stage + tps.index(dist.get_rank()))
    model = nn.Sequential(*[ParallelMLP(dim, tp) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dps.index(dist.get_rank()))
    batches, targets = torch.randn(4, micro, 4, dim)[:, 0], torch.randn(4, 4, dim)
    for step in range(2):
        total, kept = torch.zeros(1), []
        for x in batches:
            if stage > 0:
                x = torch.empty(4, dim)
                dist.recv(x, pps[stage - 1])
                x.requires_grad_()
            y = model(x)
            if stage < len(pps) - 1:
                dist.send(y.detach(), pps[stage + 1])
            kept.append((x, y))
        for (x, y), target in zip(kept, targets, strict=True):
            if stage == len(pps) - 1:
                loss = (y - target).pow(2).mean()
                total += loss.detach()
                loss.backward()
            else:
                gradient = torch.empty_like(y)
                dist.recv(gradient, pps[stage + 1])
                y.backward(gradient)
            if stage > 0:
                dist.send(x.grad, pps[stage - 1])
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)
            p.grad /= len(dps)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(total, pps[-1], group=pp)
        print(f"step {step} loss {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
