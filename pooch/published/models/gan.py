"""A DCGAN (Radford et al. 2016) trained in one step: generator and discriminator side by side.

One backward pass gives both gradients. The discriminator's loss sees a detached fake; the generator's loss goes through
the discriminator with detached weights. Each network thus gets the gradient of its own loss alone, at the weights
before the step (simultaneous gradient descent; the paper alternates).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from ...ground.errors import UsageError
from ...workloads.base import Workload

_SMALLEST_IMAGE = 8


def _levels(image_size: int) -> int:
    """Return how many times 4x4 is doubled to make an image.

    Raises:
        UsageError: the size is not a power of two of at least 8.
    """
    if image_size < _SMALLEST_IMAGE or image_size & (image_size - 1):
        raise UsageError(
            f"image_size={image_size} is not a power of two of at least {_SMALLEST_IMAGE}: choose 64, for example"
        )
    return image_size.bit_length() - 3


def make_generator(image_size: int, noise_size: int, width: int) -> nn.Sequential:
    """Make a network from noise (N, noise_size, 1, 1) to images (N, 3, image_size, image_size).

    Args:
        image_size: pixels of a side.
        noise_size: channels of the noise.
        width: channels before the last layer.

    Raises:
        UsageError: the image size is not a power of two of at least 8.
    """
    channels = width * 2 ** (_levels(image_size) - 1)
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(noise_size, channels, 4, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
    ]  # fmt: skip
    while channels > width:
        layers += [
            nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(channels // 2),
            nn.ReLU(inplace=True),
        ]
        channels //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def make_discriminator(image_size: int, width: int) -> nn.Sequential:
    """Make a network from images (N, 3, image_size, image_size) to logits (N,).

    Args:
        image_size: pixels of a side.
        width: channels after the first layer.

    Raises:
        UsageError: the image size is not a power of two of at least 8.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    channels = width
    for _ in range(_levels(image_size) - 1):
        layers += [
            nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.LeakyReLU(0.2, inplace=True),
        ]
        channels *= 2
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4, bias=False), nn.Flatten(0))


class Gan(nn.Module):
    """Both networks; one call returns all logits that the two losses need."""

    def __init__(self, image_size: int, noise_size: int, width: int) -> None:
        super().__init__()
        self.noise_size = noise_size
        self.generator = make_generator(image_size, noise_size, width)
        self.discriminator = make_discriminator(image_size, width)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits (N,) of real images and of detached fakes for the discriminator, and of fakes for the generator."""
        noise = torch.randn(images.shape[0], self.noise_size, 1, 1, device=images.device)
        fakes = self.generator(noise)
        real, fake = self.discriminator(images), self.discriminator(fakes.detach())
        frozen = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        return real, fake, functional_call(self.discriminator, frozen, fakes)


def build(
    batch_size: int = 64,
    device: str = "cpu",
    image_size: int = 64,
    width: int = 64,
    noise_size: int = 100,
    seed: int = 0,
) -> Workload:
    """A DCGAN with random weights on random images, fresh noise each step; Adam.

    The loss is the sum of the discriminator's and the generator's (non-saturating) binary cross entropy.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = Gan(image_size, noise_size, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(batch_size, 3, image_size, image_size, generator=generator).mul(2).sub(1).to(device)

    def forward() -> torch.Tensor:
        real, fake, fooled = model(images)
        entropy = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones_like(real), torch.zeros_like(real)
        return entropy(real, ones) + entropy(fake, zeros) + entropy(fooled, ones)

    return Workload(model, forward, optimizer, "gan", batch_size)
