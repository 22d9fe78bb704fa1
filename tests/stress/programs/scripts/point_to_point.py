"""Blocking and non-blocking messages, a batch of them, and a token around the ring."""

import torch
import torch.distributed as dist


def blocking(rank):
    x = torch.zeros(1)
    if rank == 0:
        dist.send(x + 1, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    print("blocking", x.item())


def immediate(rank):
    x = torch.zeros(1)
    if rank == 0:
        dist.isend(x + 2, dst=1).wait()
    elif rank == 1:
        dist.irecv(x, src=0).wait()
    print("immediate", x.item())


def batch(rank, size):
    out, into = torch.full((8,), float(rank)), torch.empty(8)
    ops = [
        dist.P2POp(dist.isend, out, (rank + 1) % size),
        dist.P2POp(dist.irecv, into, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    print("batch", into.sum().item())


def token(rank, size):
    t = torch.zeros(1)
    if rank == 0:
        dist.send(t, 1)
        dist.recv(t, size - 1)
    else:
        dist.recv(t, rank - 1)
        dist.send(t + rank, (rank + 1) % size)
    print("token", t.item())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    r, n = dist.get_rank(), dist.get_world_size()
    blocking(r)
    immediate(r)
    batch(r, n)
    token(r, n)
    dist.destroy_process_group()
