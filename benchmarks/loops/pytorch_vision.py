"""Pictures, as in PyTorch's examples, written from what they document, with random data and small sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops.loop import Loop, loop


def _digits(count: int) -> TensorDataset:
    return TensorDataset(torch.rand(count, 1, 28, 28), torch.randint(10, (count,)))


class _Mnist(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


@loop()
def mnist(run: Loop) -> None:
    model = _Mnist()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train, test = DataLoader(_digits(150), 32, shuffle=True), DataLoader(_digits(40), 40)
    run.governs(model, optimizer)
    for _ in range(3):
        model.train()
        for data, target in train:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            run.step(loss)
        model.eval()
        with torch.no_grad():
            for data, target in test:
                output = model(data)
                run.value("test loss", functional.nll_loss(output, target, reduction="sum"))
                run.value("correct", output.argmax(1, keepdim=True).eq(target.view(-1, 1)).sum())
        scheduler.step()
    run.state("mnist_cnn", model)


@loop()
def mnist_rnn(run: Loop) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(input_size=28, hidden_size=64, batch_first=True)
            self.batchnorm, self.dropout1, self.dropout2 = nn.BatchNorm1d(64), nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            output, _ = self.rnn(inputs.reshape(-1, 28, 28))
            output = self.dropout1(self.batchnorm(output[:, -1]))
            return functional.log_softmax(self.fc2(self.dropout2(functional.relu(self.fc1(output)))), dim=1)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=0.1)
    run.governs(model, optimizer)
    for _ in range(2):
        for data, target in DataLoader(_digits(600), 128, shuffle=True):
            optimizer.zero_grad()
            loss = functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            run.step(loss)
    run.state("parameters", model)


class _BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        result: Tensor = self.relu(out)
        return result


@loop()
def imagenet(run: Loop) -> None:
    head = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks = [_BasicBlock(16, 16, 1), _BasicBlock(16, 32, 2), _BasicBlock(32, 64, 2)]
    model = nn.Sequential(*head, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    data = TensorDataset(torch.randn(60, 3, 96, 96), torch.randint(100, (60,)))
    run.governs(model, optimizer)
    for _ in range(3):
        model.train()
        for images, target in DataLoader(data, 16, shuffle=True):  # the last batch is smaller
            output = model(images)
            loss = criterion(output, target)
            _, predicted = output.topk(5, 1, True, True)
            run.value("top 5", predicted.t().eq(target.view(1, -1)).reshape(-1).float().sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
        model.eval()
        with torch.no_grad():
            run.value("validation", criterion(model(data.tensors[0][:24]), data.tensors[1][:24]))
        scheduler.step()
    run.state("model", model)
    run.state("optimizer", optimizer.state_dict())


def _dcgan_weights(module: nn.Module) -> None:
    if isinstance(module, nn.ConvTranspose2d | nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


@loop()
def dcgan(run: Loop) -> None:
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(64, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    generator.apply(_dcgan_weights)
    discriminator.apply(_dcgan_weights)
    criterion, fixed = nn.BCELoss(), torch.randn(16, 32, 1, 1)
    of_discriminator = optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_generator = optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    data = torch.rand(160, 3, 32, 32)
    run.governs([generator, discriminator])
    for (real,) in DataLoader(TensorDataset(data), 16, shuffle=True):
        discriminator.zero_grad()
        label = torch.full((16,), 1.0)
        loss_of_real = criterion(discriminator(real), label)
        loss_of_real.backward()
        fake = generator(torch.randn(16, 32, 1, 1))
        label.fill_(0.0)
        loss_of_fake = criterion(discriminator(fake.detach()), label)
        loss_of_fake.backward()
        of_discriminator.step()
        generator.zero_grad()
        label.fill_(1.0)
        output = discriminator(fake)
        loss_of_generator = criterion(output, label)
        loss_of_generator.backward()
        of_generator.step()
        run.value("D(G(z))", output.mean())
        run.step(loss_of_real + loss_of_fake, loss_of_generator)
    with torch.no_grad():
        run.value("samples", generator(fixed).sum())
    run.state("netG", generator)
    run.state("netD", discriminator)


@loop()
def vae(run: Loop) -> None:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(784, 64), nn.Linear(64, 20), nn.Linear(64, 20)
            self.fc3, self.fc4 = nn.Linear(20, 64), nn.Linear(64, 784)

        def decode(self, z: Tensor) -> Tensor:
            return torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = functional.relu(self.fc1(x.view(-1, 784)))
            mu, logvar = self.fc21(hidden), self.fc22(hidden)
            std = torch.exp(0.5 * logvar)
            return self.decode(mu + torch.randn_like(std) * std), mu, logvar

    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    digits = _digits(2000)
    run.governs(model, optimizer)
    for _ in range(3):
        for data, _ in DataLoader(digits, 512, shuffle=True):
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = functional.binary_cross_entropy(recon, data.view(-1, 784), reduction="sum")
            loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            optimizer.step()
            run.step(loss)
        with torch.no_grad():  # a method, not a call of the model
            run.value("sample", model.decode(torch.randn(64, 20)).sum())
    run.state("parameters", model)


@loop()
def siamese_network(run: Loop) -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.resnet = nn.Sequential(
                nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, 2, 1),
                nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            )  # fmt: skip
            self.fc = nn.Sequential(nn.Linear(128, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return torch.sigmoid(self.fc(torch.cat((self.resnet(first), self.resnet(second)), 1)))

    model = Siamese()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    run.governs(model, optimizer)
    for _ in range(10):
        images, targets = torch.rand(2, 24, 1, 28, 28), torch.randint(2, (24,)).float()
        optimizer.zero_grad()
        loss = criterion(model(images[0], images[1]).squeeze(), targets)
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.state("siamese_network", model)


@loop()
def super_resolution(run: Loop) -> None:
    class Net(nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.relu, self.pixel_shuffle = nn.ReLU(), nn.PixelShuffle(factor)
            self.conv1, self.conv2 = nn.Conv2d(1, 64, 5, 1, 2), nn.Conv2d(64, 64, 3, 1, 1)
            self.conv3, self.conv4 = nn.Conv2d(64, 32, 3, 1, 1), nn.Conv2d(32, factor**2, 3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
            result: Tensor = self.pixel_shuffle(self.conv4(x))
            return result

    model, criterion = Net(3), nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    run.governs(model, optimizer)
    for epoch in range(2):
        for _ in range(5):
            inputs, target = torch.rand(4, 1, 32, 32), torch.rand(4, 1, 96, 96)
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            optimizer.step()
            run.step(loss)
        with torch.no_grad():
            run.value(
                "psnr", 10 * torch.log10(1 / criterion(model(torch.rand(4, 1, 32, 32)), torch.rand(4, 1, 96, 96)))
            )
        run.state(f"model_epoch_{epoch}", model)


@loop()
def vision_transformer(run: Loop) -> None:
    class PatchExtractor(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            batch, channels, height, width = images.shape
            patches = images.unfold(2, 4, 4).unfold(3, 4, 4).contiguous()
            return patches.view(batch, channels, -1, 16).transpose(1, 2).reshape(batch, height * width // 16, -1)

    class InputEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extract, self.project = PatchExtractor(), nn.Linear(48, 64)
            self.token, self.position = nn.Parameter(torch.randn(1, 1, 64)), nn.Parameter(torch.randn(1, 65, 64))

        def forward(self, images: Tensor) -> Tensor:
            patches = self.project(self.extract(images))
            result: Tensor = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.position
            return result

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
            self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
            self.mlp = nn.Sequential(
                nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.Dropout(0.1)
            )

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm1(x)
            x = x + self.attention(normed, normed, normed)[0]
            result: Tensor = x + self.mlp(self.norm2(x))
            return result

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoders = InputEmbedding(), nn.Sequential(*(Encoder() for _ in range(3)))
            self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 10))

        def forward(self, images: Tensor) -> Tensor:
            result: Tensor = self.head(self.encoders(self.embedding(images))[:, 0])
            return result

    model, criterion = ViT(), nn.CrossEntropyLoss()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    run.governs(model, optimizer)
    for _ in range(10):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.step(loss)
    run.state("parameters", model)


@loop()
def forward_forward(run: Loop) -> None:
    class Layer(nn.Linear):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__(inside, outside)
            self.opt, self.threshold = optim.Adam(self.parameters(), lr=0.03), 1.0

        def forward(self, x: Tensor) -> Tensor:
            direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
            return torch.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

        def train_once(self, positive: Tensor, negative: Tensor) -> Tensor:
            good, bad = self.forward(positive).pow(2).mean(1), self.forward(negative).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-good + self.threshold, bad - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            return loss.detach()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(784, 100), Layer(100, 100)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    net, positive, negative = Net(), torch.rand(2000, 784), torch.rand(2000, 784)
    run.governs(net)
    h_pos, h_neg = positive, negative
    for layer in net.layers:
        for _ in range(6):
            run.step(layer.train_once(h_pos, h_neg))
        h_pos, h_neg = layer(h_pos).detach(), layer(h_neg).detach()
    run.state("parameters", net)


class _Vgg(nn.Sequential):
    """The first layers of a VGG, frozen, as `torchvision.models.vgg16(weights).features` with random ones."""

    def __init__(self) -> None:
        convs = [(3, 16), (16, 16), (16, 32), (32, 32)]
        layers = [layer for sizes in convs for layer in (nn.Conv2d(*sizes, 3, padding=1), nn.ReLU(inplace=False))]
        super().__init__(*layers[:4], nn.MaxPool2d(2), *layers[4:])
        self.eval()
        for parameter in self.parameters():
            parameter.requires_grad_(False)


def _gram(features: Tensor) -> Tensor:
    batch, channels, height, width = features.size()
    flat = features.view(batch, channels, width * height)
    return flat.bmm(flat.transpose(1, 2)) / (channels * height * width)


@loop()
def neural_style(run: Loop) -> None:
    class ContentLoss(nn.Module):
        def __init__(self, target: Tensor) -> None:
            super().__init__()
            self.target, self.loss = target.detach(), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.loss = functional.mse_loss(x, self.target)
            return x

    class StyleLoss(ContentLoss):
        def forward(self, x: Tensor) -> Tensor:
            self.loss = functional.mse_loss(_gram(x), self.target)
            return x

    vgg, content, style = _Vgg(), torch.rand(1, 3, 96, 96), torch.rand(1, 3, 96, 96)
    model, losses = nn.Sequential(), list[ContentLoss]()
    for number, layer in enumerate(vgg):
        model.add_module(f"layer {number}", layer)
        if isinstance(layer, nn.Conv2d):
            with torch.no_grad():
                losses += [StyleLoss(_gram(model(style))), ContentLoss(model(content))][: 2 if number == 7 else 1]
            for each in losses[-2:] if number == 7 else losses[-1:]:
                model.add_module(f"loss {number} {type(each).__name__}", each)
    picture = content.clone().requires_grad_(True)
    model.eval()
    model.requires_grad_(False)
    optimizer = optim.LBFGS([picture], max_iter=5)
    run.governs(model, optimizer)
    for _ in range(5):

        def closure() -> Tensor:
            with torch.no_grad():
                picture.clamp_(0, 1)
            optimizer.zero_grad()
            model(picture)
            loss: Tensor = sum((1e3 * each.loss for each in losses), torch.zeros(()))
            loss.backward()
            return loss

        run.step(optimizer.step(closure))
    run.state("picture", {"picture": picture.detach()})


@loop()
def fast_neural_style(run: Loop) -> None:
    def conv(inside: int, outside: int, kernel: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.ReflectionPad2d(kernel // 2), nn.Conv2d(inside, outside, kernel, stride))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.in1 = conv(32, 32, 3, 1), nn.InstanceNorm2d(32, affine=True)
            self.conv2, self.in2 = conv(32, 32, 3, 1), nn.InstanceNorm2d(32, affine=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.in2(self.conv2(torch.relu(self.in1(self.conv1(x)))))
            return out + x

    transformer = nn.Sequential(
        conv(3, 16, 9, 1), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), conv(16, 32, 3, 2),
        nn.InstanceNorm2d(32, affine=True), nn.ReLU(), Residual(), Residual(), nn.Upsample(scale_factor=2),
        conv(32, 16, 3, 1), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), conv(16, 3, 9, 1),
    )  # fmt: skip
    vgg, mse = _Vgg(), nn.MSELoss()
    optimizer = optim.Adam(transformer.parameters(), 1e-3)
    gram_style = _gram(vgg(torch.rand(1, 3, 48, 48))).expand(4, -1, -1)
    run.governs([transformer, vgg], optimizer)
    for _ in range(8):
        x = torch.rand(4, 3, 48, 48)
        optimizer.zero_grad()
        y = transformer(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = 1e5 * mse(features_y, features_x)
        style_loss = 1e8 * mse(_gram(features_y), gram_style)
        total = content_loss + style_loss
        total.backward()
        optimizer.step()
        run.step(content_loss, style_loss)
    run.state("transformer", transformer)
