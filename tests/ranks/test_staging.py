"""Host staging for shared GPUs, tried on CPU tensors: staged calls must equal torch's own."""

from __future__ import annotations

import torch
import torch.distributed as dist

import distkit as dk


def test_staged_calls_equal_gloos_own() -> None:
    def program() -> list[list[float]]:
        from distkit.cluster.rank import gpu_staging

        gpu_staging.install(key="AutogradCPU")  # in front of gloo's CPU kernels instead of CUDA's
        rank, n = dist.get_rank(), dist.get_world_size()
        mine = torch.arange(4.0) + 10 * rank
        into = torch.zeros(4)
        coming = dist.irecv(into, src=(rank - 1) % n)
        dist.send(mine, dst=(rank + 1) % n)
        unfinished = into.sum().item()
        assert coming is not None
        coming.wait()
        all_of_them = [torch.zeros(4) for _ in range(n)]
        dist.all_gather(all_of_them, mine)
        flat = torch.zeros(4 * n)
        dist.all_gather_into_tensor(flat, mine)
        swapped = torch.zeros(4)
        dist.all_to_all_single(swapped, mine)
        scattered = torch.zeros(4)
        dist.scatter(scattered, list(all_of_them) if rank == 0 else None)
        total = mine.clone()
        dist.all_reduce(total)
        return [
            [unfinished],
            into.tolist(),
            torch.cat(all_of_them).tolist(),
            flat.tolist(),
            swapped.tolist(),
            scattered.tolist(),
            total.tolist(),
        ]

    for rank, found in enumerate(dk.run_ranks(program, 2, record=False).results):
        one, two = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
        assert found == [
            [0.0],
            two if rank == 0 else one,
            one + two,
            one + two,
            one[:2] + two[:2] if rank == 0 else one[2:] + two[2:],
            one if rank == 0 else two,
            [10.0, 12.0, 14.0, 16.0],
        ]
