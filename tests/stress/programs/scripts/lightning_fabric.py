"""Lightning Fabric: launch, setup, backward, all_reduce."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(7, verbose=False)
x = torch.randn(32, 4)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1)), batch_size=4))
model = nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
for features, target in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(features).squeeze(1), target)
    fabric.backward(loss)
    optimizer.step()
    print("loss", loss.item(), "mean", fabric.all_reduce(loss.detach(), reduce_op="mean").item())
