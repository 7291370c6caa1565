"""Lightning: the loss inside `training_step`, which calls submodules; the LightningModule itself is never called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.setups.nets import conv_net, pictures
from benchmarks.setups.setup import setup
from benchmarks.setups.way import Way


def made_module() -> Any:
    """A classifier with a metric, the usual way."""
    import lightning
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = conv_net(classes=32)
            self.head = nn.Sequential(nn.GELU(), nn.Linear(32, 10))
            self.accuracy, self.validated = MulticlassAccuracy(10), MulticlassAccuracy(10)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            images, labels = batch
            logits = self.head(self.backbone(images))
            loss = cross_entropy(logits, labels)
            self.accuracy(logits, labels)
            self.log("loss", loss)
            self.log("accuracy", self.accuracy)
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            images, labels = batch
            self.validated(self.head(self.backbone(images)), labels)
            self.log("validated", self.validated)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return Classifier()


def watching(way: Way) -> Any:
    """A callback that writes into the record."""
    import lightning

    class Watching(lightning.Callback):
        def on_train_start(self, *_: Any) -> None:
            way.record.begin()

        def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
            way.record.step(*([outputs["loss"]] if outputs else []))

        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            for name in sorted(trainer.callback_metrics):
                way.record.value(name, trainer.callback_metrics[name])

    return Watching()


def made_trainer(callbacks: list[Any], **options: Any) -> Any:
    """A Trainer that writes nothing."""
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    usual: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lightning.Trainer(callbacks=callbacks, **(usual | options))


def loader(count: int) -> Any:
    """Pictures with labels; the last batch is smaller."""
    return DataLoader(TensorDataset(pictures(count), torch.randint(10, (count,))), batch_size=16)


@setup("Lightning: loss and metrics in `training_step`, validation each epoch", needs="lightning")
def lightning_module(way: Way) -> None:
    module = made_module()
    trainer = made_trainer([*way.lightning_callbacks(), watching(way)], max_epochs=3)
    trainer.fit(module, loader(90), loader(32))
    way.record.state("parameters", module)


@setup("Lightning: bf16-mixed, accumulation over two batches, clipping", needs="lightning")
def lightning_bfloat16(way: Way) -> None:
    module = made_module()
    trainer = made_trainer(
        [*way.lightning_callbacks(), watching(way)], max_epochs=3, precision="bf16-mixed", accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, loader(106))
    way.record.state("parameters", module)


def made_manual_module() -> Any:
    """Manual optimization with two optimizers, `manual_backward` in the middle of `training_step`."""
    import lightning

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.encoder, self.decoder = conv_net(classes=48, blocks=3), nn.Linear(48, 10)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            images, labels = batch
            for optimizer in self.optimizers():
                loss = cross_entropy(self.decoder(self.encoder(images)), labels)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.Adam(self.encoder.parameters()), torch.optim.SGD(self.decoder.parameters(), lr=0.1)]

    return Manual()


@setup("Lightning: manual optimization, two optimizers, two backward passes in one `training_step`", needs="lightning")
def lightning_manual(way: Way) -> None:
    module = made_manual_module()
    trainer = made_trainer([*way.lightning_callbacks(), watching(way)], max_epochs=2)
    trainer.fit(module, loader(112))
    way.record.state("parameters", module)


@setup('Lightning on two ranks, `strategy="ddp"`: loss and metrics in `training_step`', needs="lightning", ranks=2)
def lightning_two_ranks(way: Way) -> None:
    module = made_module()
    trainer = made_trainer([*way.lightning_callbacks(), watching(way)], max_epochs=3, strategy="ddp", devices=2)
    trainer.fit(module, loader(180))
    way.record.state("parameters", module)
