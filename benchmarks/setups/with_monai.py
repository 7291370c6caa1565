"""MONAI's 3D networks with its losses, bf16 autocast and sliding-window validation; ignite's engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.setups.nets import conv_net, pictures
from benchmarks.setups.setup import setup
from benchmarks.setups.way import Way


def segmented(way: Way, model: nn.Module, side: int, *, batch_size: int = 1, steps: int = 12) -> None:
    """Train on random volumes with two labels; every fourth step a larger volume is validated window by window."""
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    way.auto(model, optimizer)
    for step in range(steps):
        volumes = torch.randn(batch_size, 1, side, side, side)
        labels = torch.randint(2, volumes.shape).float()
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(volumes), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                whole = torch.randn(1, 1, side, side, side * 3 // 2)
                found = sliding_window_inference(whole, (side,) * 3, 1, model)
            way.record.value("validation", found.float().mean())
            model.train()
    way.record.state("parameters", model)


@setup("MONAI: 3D U-Net, bf16, sliding-window validation", needs="monai")
def monai_unet(way: Way) -> None:
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    segmented(way, model, 64)


@setup("MONAI: SegResNet, bf16, sliding-window validation", needs="monai")
def monai_segresnet(way: Way) -> None:
    from monai.networks.nets import SegResNet

    model = SegResNet(init_filters=8, in_channels=1, out_channels=2, dropout_prob=0.1)
    segmented(way, model, 48)


@setup("MONAI: SwinUNETR, bf16, sliding-window validation", needs="monai")
def monai_swin_unetr(way: Way) -> None:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8))
    segmented(way, model, 64, steps=6)


def in_bfloat16(inferer: Any) -> Any:
    """An inferer that runs in bf16 on a CPU, where `amp=True` has no effect: it means CUDA's autocast."""
    from monai.inferers import Inferer

    class InBfloat16(Inferer):
        def __call__(self, inputs: Tensor, network: nn.Module, *args: Any, **options: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                found: Tensor = inferer(inputs, network, *args, **options)
            return found

    return InBfloat16()


class Volumes(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random volumes with two labels, as MONAI's engines take them."""

    def __init__(self, count: int, *sides: int) -> None:
        self.entries = [
            {"image": torch.randn(1, *sides), "label": torch.randint(2, (1, *sides)).float()} for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.entries[index]


@setup(
    "MONAI: SupervisedTrainer with AMP and a smaller last batch, SupervisedEvaluator with sliding windows each epoch",
    needs="monai",
)
def monai_supervised(way: Way) -> None:
    from ignite.engine import Events
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import MeanDice, ValidationHandler, from_engine
    from monai.inferers import SimpleInferer, SlidingWindowInferer
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from torch.utils.data import DataLoader

    side = 48
    model = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    evaluator = SupervisedEvaluator(
        device=torch.device("cpu"),
        val_data_loader=DataLoader(Volumes(2, side, side, side * 3 // 2)),
        network=model,
        inferer=in_bfloat16(SlidingWindowInferer((side,) * 3, sw_batch_size=1)),
        key_val_metric={"dice": MeanDice(output_transform=from_engine(["pred", "label"]))},
        amp=True,
    )
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=3,
        train_data_loader=DataLoader(Volumes(9, side, side, side), batch_size=2),
        network=model,
        optimizer=optimizer,
        loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
        inferer=in_bfloat16(SimpleInferer()),
        train_handlers=[ValidationHandler(1, evaluator)],
        amp=True,
    )
    way.auto(model, optimizer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine: Any) -> None:
        way.record.step(from_engine("loss", first=True)(engine.state.output))

    @evaluator.on(Events.EPOCH_COMPLETED)
    def _(engine: Any) -> None:
        way.record.value("dice", engine.state.metrics["dice"])

    trainer.run()
    way.record.state("parameters", model)


@setup("ignite: create_supervised_trainer and an evaluator after each epoch", needs="ignite")
def ignite_engine(way: Way) -> None:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy
    from torch.utils.data import DataLoader, TensorDataset

    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    data = DataLoader(TensorDataset(pictures(88), torch.randint(10, (88,))), batch_size=16)
    way.auto(model, optimizer)
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine: Any) -> None:
        way.record.step(engine.state.output)

    @trainer.on(Events.EPOCH_COMPLETED)
    def _(_: Any) -> None:
        evaluator.run(data)
        way.record.value("accuracy", evaluator.state.metrics["accuracy"])

    trainer.run(data, max_epochs=3)
    way.record.state("parameters", model)
