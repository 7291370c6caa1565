"""Sequences, graphs, games and plain functions, as in PyTorch's examples, written from what they document."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn, optim
from torch.distributions import Categorical
from torch.nn import functional

from benchmarks.loops.loop import Loop, loop


def _batchify(tokens: Tensor, size: int) -> Tensor:
    return tokens.narrow(0, 0, len(tokens) // size * size).view(size, -1).t().contiguous()


class _RnnModel(nn.Module):
    def __init__(self, kind: str, words: int) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, 48)
        self.rnn = getattr(nn, kind)(48, 48, 2, dropout=0.2)
        self.decoder, self.kind, self.words = nn.Linear(48, words), kind, words
        self.decoder.weight = self.encoder.weight  # tied

    def forward(self, tokens: Tensor, hidden: object) -> tuple[Tensor, object]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.words)
        return functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, size: int) -> object:
        weight = next(self.parameters())
        zeros = weight.new_zeros(2, size, 48)
        return (zeros, weight.new_zeros(2, size, 48)) if self.kind == "LSTM" else zeros


def _repackaged(hidden: object) -> object:
    return hidden.detach() if isinstance(hidden, Tensor) else tuple(map(_repackaged, hidden))  # type: ignore[call-overload]


def _word_language_model(run: Loop, kind: str) -> None:
    words, bptt = 200, 35
    train = _batchify(torch.randint(words, (5000,)), 16)
    model, criterion = _RnnModel(kind, words), nn.NLLLoss()
    hidden = model.init_hidden(16)
    run.governs(model)
    for begin in range(0, len(train) - 1, bptt):  # the last part is shorter
        length = min(bptt, len(train) - 1 - begin)
        data, targets = train[begin : begin + length], train[begin + 1 : begin + 1 + length].view(-1)
        model.zero_grad()
        hidden = _repackaged(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-20)
        run.step(loss)
    model.eval()
    with torch.no_grad():
        run.value("test loss", criterion(model(train[:bptt], model.init_hidden(16))[0], train[1 : bptt + 1].view(-1)))
    run.state("model", model)


@loop()
def word_language_model_lstm(run: Loop) -> None:
    _word_language_model(run, "LSTM")


@loop()
def word_language_model_gru(run: Loop) -> None:
    _word_language_model(run, "GRU")


class _Positional(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        position = torch.arange(200).unsqueeze(1)
        scale = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(200, 1, width)
        table[:, 0, 0::2], table[:, 0, 1::2] = torch.sin(position * scale), torch.cos(position * scale)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("pe", table)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(x + self.pe[: x.size(0)])
        return result


@loop()
def word_language_model_transformer(run: Loop) -> None:
    class TransformerModel(nn.Transformer):
        def __init__(self, words: int) -> None:
            super().__init__(d_model=48, nhead=2, dim_feedforward=96, num_encoder_layers=3)
            self.input_emb, self.pos_encoder = nn.Embedding(words, 48), _Positional(48)
            self.decoder: nn.Module = nn.Linear(48, words)

        def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
            mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
            values = self.pos_encoder(self.input_emb(src) * math.sqrt(48))
            return functional.log_softmax(self.decoder(self.encoder(values, mask=mask)), dim=-1)

    train, model, criterion = _batchify(torch.randint(200, (5000,)), 16), TransformerModel(200), nn.NLLLoss()
    run.governs(model)
    for begin in range(0, len(train) - 1, 35):
        length = min(35, len(train) - 1 - begin)
        model.zero_grad()
        output = model(train[begin : begin + length]).view(-1, 200)
        loss = criterion(output, train[begin + 1 : begin + 1 + length].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.5)  # type: ignore[arg-type]
        run.step(loss)
    run.state("model", model)


@loop()
def language_translation(run: Loop) -> None:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target, self.position = nn.Embedding(150, 48), nn.Embedding(150, 48), _Positional(48)
            self.transformer = nn.Transformer(48, 4, 2, 2, 96, 0.1)
            self.generator = nn.Linear(48, 150)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(len(target))
            source_padding, target_padding = (source == 1).t(), (target == 1).t()
            values = self.transformer(
                self.position(self.source(source)), self.position(self.target(target)), None, mask, None,
                source_padding, target_padding, source_padding,
            )  # fmt: skip
            result: Tensor = self.generator(values)
            return result

    model, criterion = Seq2Seq(), nn.CrossEntropyLoss(ignore_index=1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    optimizer = optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    run.governs(model, optimizer)
    for number in range(12):  # other lengths in every batch, padded
        source, target = torch.randint(2, 150, (20 + number, 12)), torch.randint(2, 150, (24 + 2 * number % 9, 12))
        source[-3:, ::2], target[-2:, ::3] = 1, 1
        logits = model(source, target[:-1])
        optimizer.zero_grad()
        loss = criterion(logits.reshape(-1, 150), target[1:].reshape(-1))
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.state("parameters", model)


@loop()
def time_sequence_prediction(run: Loop) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

        def forward(self, inputs: Tensor, future: int = 0) -> Tensor:
            outputs = []
            h_t, c_t, h_t2, c_t2 = (torch.zeros(len(inputs), 51, dtype=torch.double) for _ in range(4))
            for input_t in inputs.split(1, dim=1):
                h_t, c_t = self.lstm1(input_t, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                outputs.append(self.linear(h_t2))
            for _ in range(future):
                h_t, c_t = self.lstm1(outputs[-1], (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                outputs.append(self.linear(h_t2))
            return torch.cat(outputs, dim=1)

    data = torch.sin((torch.arange(40.0) + torch.randint(-80, 80, (48, 1))) / 20).double()
    model, criterion = Sequence().double(), nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    run.governs(model, optimizer)
    for _ in range(4):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = criterion(model(data[3:, :-1]), data[3:, 1:])
            loss.backward()
            run.value("loss", loss)
            return loss

        run.step(optimizer.step(closure))
        with torch.no_grad():
            run.value("test loss", criterion(model(data[:3, :-1], future=20)[:, :-20], data[:3, 1:]))
    run.state("parameters", model)


@loop()
def regression(run: Loop) -> None:
    fc = nn.Linear(4, 1)
    weights, bias = torch.randn(4, 1) * 5, torch.randn(1) * 5
    run.governs(fc)
    for _ in range(20):
        x = torch.randn(4096).unsqueeze(1)
        features = torch.cat([x**power for power in range(1, 5)], 1)
        fc.zero_grad()
        output = functional.smooth_l1_loss(fc(features), features.mm(weights) + bias)
        output.backward()
        for parameter in fc.parameters():
            parameter.data.add_(-0.1 * parameter.grad)  # type: ignore[operator]
        run.step(output)
    run.state("parameters", fc)


class _Pole:
    """A cart with a pole, as the usual environment has it."""

    def reset(self) -> Tensor:
        self._state = torch.empty(4).uniform_(-0.05, 0.05)
        return self._state.clone()

    def step(self, action: int) -> tuple[Tensor, bool]:
        x, speed, angle, turning = self._state.tolist()
        force, sine, cosine = (10.0 if action else -10.0), math.sin(angle), math.cos(angle)
        inner = (force + 0.05 * turning**2 * sine) / 1.1
        bent = (9.8 * sine - cosine * inner) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pushed = inner - 0.05 * bent * cosine / 1.1
        self._state = torch.tensor(
            [x + 0.02 * speed, speed + 0.02 * pushed, angle + 0.02 * turning, turning + 0.02 * bent]
        )
        return self._state.clone(), abs(x) > 2.4 or abs(angle) > 0.21


@loop()
def reinforce(run: Loop) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.dropout, self.affine2 = nn.Linear(4, 2048), nn.Dropout(0.6), nn.Linear(2048, 2)

        def forward(self, x: Tensor) -> Tensor:
            return functional.softmax(self.affine2(functional.relu(self.dropout(self.affine1(x)))), dim=1)

    policy, pole = Policy(), _Pole()
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)
    run.governs(policy, optimizer)
    for _ in range(10):
        state, logs, rewards = pole.reset(), list[Tensor](), list[float]()
        for _ in range(60):
            chosen = Categorical(policy(state.unsqueeze(0)))
            action = chosen.sample()
            logs.append(chosen.log_prob(action))
            state, is_done = pole.step(int(action.item()))
            rewards.append(1.0)
            if is_done:
                break
        returns, total = list[float](), 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        scaled = torch.tensor(returns)
        scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-7)
        optimizer.zero_grad()
        loss = torch.cat([-log * value for log, value in zip(logs, scaled, strict=True)]).sum()
        loss.backward()
        optimizer.step()
        run.value("length", len(rewards))
        run.step(loss)
    run.state("parameters", policy)


@loop()
def actor_critic(run: Loop) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1 = nn.Linear(4, 1024)
            self.action_head, self.value_head = nn.Linear(1024, 2), nn.Linear(1024, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = functional.relu(self.affine1(x))
            return functional.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model, pole = Policy(), _Pole()
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    run.governs(model, optimizer)
    for _ in range(10):
        state, saved = pole.reset(), list[tuple[Tensor, Tensor]]()
        for _ in range(60):
            probabilities, value = model(state)
            chosen = Categorical(probabilities)
            action = chosen.sample()
            saved.append((chosen.log_prob(action), value))
            state, is_done = pole.step(int(action.item()))
            if is_done:
                break
        returns = torch.tensor([(1 - 0.99 ** (len(saved) - n)) / 0.01 for n in range(len(saved))])
        returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        policy_losses = [-log * (ret - value.item()) for (log, value), ret in zip(saved, returns, strict=True)]
        value_losses = [
            functional.smooth_l1_loss(value, ret.reshape(1)) for (_, value), ret in zip(saved, returns, strict=True)
        ]
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.state("parameters", model)


def _graph(nodes: int) -> Tensor:
    """A normalized adjacency matrix, dense."""
    matrix = (torch.rand(nodes, nodes) < 0.02).float()
    matrix = ((matrix + matrix.t()) > 0).float() + torch.eye(nodes)
    degree = matrix.sum(1).pow(-0.5)
    return degree[:, None] * matrix * degree[None]


class _GraphConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_normal_(torch.empty(inside, outside)))
        self.bias = nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ torch.mm(x, self.kernel) + self.bias


class _Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = _GraphConv(64, 64), _GraphConv(64, 7)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = functional.dropout(functional.relu(self.gc1(x, adjacency)), 0.5, self.training)
        return functional.log_softmax(self.gc2(x, adjacency), dim=1)


def _train_on_a_graph(run: Loop, model: nn.Module, adjacency: Tensor, nodes: int) -> None:
    features, labels = torch.rand(nodes, 64), torch.randint(7, (nodes,))
    order = torch.randperm(nodes)
    train, test, criterion = order[: nodes // 2], order[nodes // 2 :], nn.NLLLoss()
    optimizer = optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    run.governs(model, optimizer)
    for _ in range(10):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(features, adjacency)[train], labels[train])
        loss.backward()
        optimizer.step()
        run.step(loss)
        model.eval()
        with torch.no_grad():
            run.value("accuracy", (model(features, adjacency)[test].argmax(1) == labels[test]).float().mean())
    run.state("parameters", model)


@loop()
def gcn(run: Loop) -> None:
    _train_on_a_graph(run, _Gcn(), _graph(1500), 1500)


@loop()
def gcn_sparse(run: Loop) -> None:
    _train_on_a_graph(run, _Gcn(), _graph(1500).to_sparse(), 1500)


@loop()
def gat(run: Loop) -> None:
    class Attention(nn.Module):
        def __init__(self, inside: int, outside: int, heads: int, concatenated: bool) -> None:
            super().__init__()
            self.heads, self.concatenated = heads, concatenated
            self.width = outside // heads if concatenated else outside
            self.W = nn.Parameter(nn.init.xavier_normal_(torch.empty(inside, self.width * heads)))
            self.a = nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, 2 * self.width, 1)))

        def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
            count = len(h)
            h = functional.dropout(torch.mm(h, self.W), 0.6, training=self.training)
            h = h.view(count, self.heads, self.width).permute(1, 0, 2)
            source, target = h @ self.a[:, : self.width], h @ self.a[:, self.width :]
            e = functional.leaky_relu(source + target.mT, 0.2)
            attention = torch.where(adjacency > 0, e, -9e16 * torch.ones_like(e))
            attention = functional.dropout(functional.softmax(attention, dim=-1), 0.6, training=self.training)
            prime = attention @ h
            if self.concatenated:
                return prime.permute(1, 0, 2).contiguous().view(count, -1)
            return prime.mean(dim=0)

    class Gat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gat1, self.gat2 = Attention(64, 32, 4, True), Attention(32, 7, 1, False)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            x = functional.dropout(functional.elu(self.gat1(x, adjacency)), 0.6, training=self.training)
            return functional.log_softmax(self.gat2(x, adjacency), dim=1)

    _train_on_a_graph(run, Gat(), _graph(400), 400)
