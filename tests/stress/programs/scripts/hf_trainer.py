"""Hugging Face's Trainer with a small custom model."""

import tempfile

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(4, generator=generator)
        return {"x": x, "labels": int(x.sum() > 0)}


set_seed(3)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,
    max_steps=4,
    report_to=[],
    save_strategy="no",
    per_device_train_batch_size=4,
    logging_steps=1,
    disable_tqdm=True,
    seed=3,
)
trainer = Trainer(Model(), arguments, train_dataset=Data())
trainer.remove_callback(PrinterCallback)  # it prints times
trainer.train()
print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
print("weight", trainer.model.layer.weight.sum().item())
