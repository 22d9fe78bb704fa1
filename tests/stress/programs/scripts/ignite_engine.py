"""An ignite engine with its distributed launcher's environment and a metric over all ranks."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy
from torch import nn


def main():
    idist.initialize("gloo")
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=False)
    model = idist.auto_model(nn.Linear(4, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(engine, batch):
        optimizer.zero_grad()
        output = model(batch[0])
        loss = nn.functional.cross_entropy(output, batch[1])
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
        return output.detach(), batch[1]

    trainer = Engine(step)
    Accuracy().attach(trainer, "accuracy")

    @trainer.on(Events.EPOCH_COMPLETED)
    def print_accuracy(engine):
        print("accuracy", engine.state.metrics["accuracy"])

    trainer.run(loader, max_epochs=2)
    idist.finalize()


if __name__ == "__main__":
    main()
