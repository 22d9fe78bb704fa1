"""Data parallelism by hand: partition the data, average gradients after each backward pass."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.head = torch.nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        return F.log_softmax(self.head(F.relu(self.conv(x)).flatten(1)), dim=1)


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= dist.get_world_size()


def run(rank, size):
    torch.manual_seed(1234)
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(3):
        total = 0.0
        for index in torch.arange(64).chunk(4):
            mine = index[rank::size]
            optimizer.zero_grad()
            loss = F.nll_loss(model(images[mine]), labels[mine])
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.item()
        print("Rank", rank, "epoch", epoch, "loss", total / 4)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
