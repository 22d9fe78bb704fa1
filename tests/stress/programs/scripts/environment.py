"""Environment variables, arguments, the ``record`` decorator and logging under a launcher."""

import argparse
import logging
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="none")
    parser.add_argument("epochs", type=int)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=local, world_size=world)
    print(args.name, args.epochs, local, world, os.environ["LOCAL_WORLD_SIZE"])
    print(os.environ["GROUP_RANK"], os.environ["ROLE_NAME"], dist.is_torchelastic_launched())
    print(int(os.environ["MASTER_PORT"]) > 0, __name__, Path(__file__).name)
    logging.getLogger("main").info("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
