"""A pool of processes on every rank, and a printed progress bar."""

import multiprocessing
import sys

import torch
import torch.distributed as dist


def tokenize(text):
    return [ord(c) % 7 for c in text]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    texts = [f"line {i} of rank {rank}" for i in range(20)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = []
        for tokens in pool.imap(tokenize, texts):
            found += tokens
            sys.stderr.write(f"\rtokens: {len(found)}")
    sys.stderr.write("\n")
    counts = torch.bincount(torch.tensor(found), minlength=7)
    dist.all_reduce(counts)
    print("counts", counts.tolist())
    dist.destroy_process_group()
