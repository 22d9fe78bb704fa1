"""A training loop with Accelerate: prepared loaders, accumulation, gathered metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    x = torch.randn(50, 6)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=5, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        right = []
        for features, labels in loader:
            with accelerator.accumulate(model):
                output = model(features)
                loss = nn.functional.cross_entropy(output, labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            right.append(accelerator.gather_for_metrics(output.argmax(1) == labels))
        print("loss", loss.item(), "right", torch.cat(right).float().mean().item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
