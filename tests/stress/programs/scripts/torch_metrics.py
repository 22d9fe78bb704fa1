"""torchmetrics: each rank updates the metrics; compute() combines them."""

import torch
import torch.distributed as dist
import torchmetrics

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
metrics = torchmetrics.MetricCollection(
    {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=3),
        "curve": torchmetrics.classification.BinaryAUROC(),
    }
)
for _ in range(3):
    metrics["accuracy"].update(torch.randint(0, 3, (20,)), torch.randint(0, 3, (20,)))
    metrics["curve"].update(torch.rand(20), torch.randint(0, 2, (20,)))
print({name: value.item() for name, value in metrics.compute().items()})
dist.destroy_process_group()
