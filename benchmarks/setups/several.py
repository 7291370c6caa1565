"""Loops with several models, several calls or another path in every step."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.setups.nets import LanguageModel, pictures
from benchmarks.setups.setup import setup
from benchmarks.setups.way import Way


@setup("a GAN: two models and two optimizers take turns")
def gan(way: Way) -> None:
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 48, 4), nn.BatchNorm2d(48), nn.ReLU(),
        nn.ConvTranspose2d(48, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 24, 4, 2, 1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.ConvTranspose2d(24, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(24, 32, 4, 2, 1), nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2), nn.Conv2d(32, 48, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(48 * 64, 1),
    )  # fmt: skip
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real_label, fake_label = torch.ones(48, 1), torch.zeros(48, 1)
    way.auto([generator, discriminator])
    for _ in range(14):
        fake = generator(torch.randn(48, 32, 1, 1))
        for_discriminator.zero_grad()
        real_loss = binary_cross_entropy_with_logits(discriminator(pictures(48, 32)), real_label)
        fake_loss = binary_cross_entropy_with_logits(discriminator(fake.detach()), fake_label)
        (real_loss + fake_loss).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        loss = binary_cross_entropy_with_logits(discriminator(fake), real_label)
        loss.backward()
        for_generator.step()
        way.record.step(real_loss, fake_loss, loss)
    way.record.state("generator", generator)
    way.record.state("discriminator", discriminator)


class MixtureOfExperts(nn.Module):
    """Each token goes through the two experts that the router picks: other shapes and other calls in every step."""

    def __init__(self, width: int = 192, experts: int = 6) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, picked = self.router(self.norm(x)).softmax(dim=-1).topk(2, dim=-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, rank = (picked == number).nonzero(as_tuple=True)
            if len(tokens):
                mixed = mixed.index_add(0, tokens, expert(x[tokens]) * weights[tokens, rank].unsqueeze(1))
        return x + mixed


@setup("a mixture of experts: the router picks other shapes in every step")
def mixture_of_experts(way: Way) -> None:
    model = nn.Sequential(nn.Linear(32, 192), *(MixtureOfExperts() for _ in range(4)), nn.Linear(192, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    way.auto(model, optimizer)
    for _ in range(16):
        loss = cross_entropy(model(torch.randn(1024, 32)), torch.randint(10, (1024,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each sequence, of shape (batch,)."""
    logits = model(tokens[:, :-1]).log_softmax(dim=-1)
    return logits.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2).sum(dim=1)


@setup("direct preference optimization: four calls of two models per backward pass, one of them without gradients")
def preference_pairs(way: Way) -> None:
    model = LanguageModel(depth=3)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    way.auto(model, optimizer)
    for _ in range(14):
        chosen, rejected = torch.randint(200, (6, 97)), torch.randint(200, (6, 81))
        with torch.no_grad():
            expected = log_likelihood(reference, chosen) - log_likelihood(reference, rejected)
        margin = log_likelihood(model, chosen) - log_likelihood(model, rejected) - expected
        loss = -logsigmoid(0.1 * margin).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)


class Tagger(nn.Module):
    """A bidirectional LSTM over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 96)
        self.lstm = nn.LSTM(96, 128, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(256, 20)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(outputs)


@setup("an LSTM over packed sequences with other lengths in every step")
def ragged_lstm(way: Way) -> None:
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters())
    way.auto(model, optimizer)
    for _ in range(14):
        lengths = torch.randint(24, 64, (32,))
        tokens = torch.randint(500, (32, int(lengths.max())))
        loss = cross_entropy(model(tokens, lengths).flatten(0, 1), torch.randint(20, (tokens.numel(),)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        way.record.step(loss)
    way.record.state("parameters", model)
