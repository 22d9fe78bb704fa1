"""A LightningModule and the Trainer."""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.layer(batch[0]).squeeze(1), batch[1])
        print("loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(7, verbose=False)
x = torch.randn(32, 4)
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True))
print("devices", trainer.world_size)
