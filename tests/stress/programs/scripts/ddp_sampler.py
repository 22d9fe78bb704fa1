"""DistributedSampler, a DataLoader with worker processes, epochs, and a metric over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(101, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        right, seen = 0, 0
        for features, target in loader:
            output = model(features)
            loss = nn.functional.cross_entropy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (output.argmax(1) == target).sum().item()
            seen += len(target)
        counts = torch.tensor([right, seen])
        dist.all_reduce(counts)
        print(f"epoch {epoch} loss {loss.item()} accuracy {(counts[0] / counts[1]).item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
