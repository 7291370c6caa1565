"""What the simulated device computes: the CPU's numbers, and random ones that repeat themselves."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.simulated_cuda.mistakes import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not is_simulated(), reason="about the simulated CUDA device: python -m tests.simulated_cuda pytest"
    ),
    pytest.mark.skipif(
        os.environ.get("SIMULATED_CUDA_NUMBERS") != "1", reason="kernels compute nothing in memory mode"
    ),
]


def attention(backend: SDPBackend, dtype: torch.dtype) -> Tensor:
    q = torch.linspace(-1, 1, 2 * 4 * 16 * 8, device="cuda", dtype=dtype).reshape(2, 4, 16, 8)
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, q.flip(-1), q, dropout_p=0.3, is_causal=True)


def recurrent(kind: Callable[..., nn.Module]) -> Tensor:
    net = kind(6, 5, num_layers=2, dropout=0.5).cuda()
    return net(torch.linspace(-1, 1, 4 * 3 * 6, device="cuda").reshape(4, 3, 6))[0]


def flat(value: float = 1.0) -> Tensor:
    return torch.full((500,), value, device="cuda")


RANDOM: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(500, device="cuda"),
    "randn": lambda: torch.randn(500, device="cuda"),
    "randint": lambda: torch.randint(0, 1000, (500,), device="cuda"),
    "randperm": lambda: torch.randperm(500, device="cuda"),
    "uniform_": lambda: flat().uniform_(2, 3),
    "normal_": lambda: flat().normal_(1, 2),
    "bernoulli_": lambda: flat().bernoulli_(0.4),
    "bernoulli": lambda: torch.bernoulli(flat(0.4)),
    "exponential_": lambda: flat().exponential_(),
    "multinomial": lambda: torch.multinomial(flat(), 50),
    "dropout": lambda: functional.dropout(flat(), 0.3),
    "dropout2d": lambda: functional.dropout2d(flat().reshape(5, 20, 5, 1), 0.3),
    "alpha_dropout": lambda: functional.alpha_dropout(flat(), 0.3, training=True),
    "rrelu": lambda: functional.rrelu(flat(-1.0), training=True),
    "gumbel_softmax": lambda: functional.gumbel_softmax(flat().reshape(50, 10)),
    "efficient attention": lambda: attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "flash attention, half": lambda: attention(SDPBackend.FLASH_ATTENTION, torch.float16),
    "flash attention, bfloat16": lambda: attention(SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_same_state_draws_the_same_numbers_and_another_draws_others(name: str) -> None:
    draw = RANDOM[name]
    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    torch.manual_seed(2)
    other = draw()
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)


def test_a_restored_generator_state_draws_the_numbers_again() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(100, device="cuda")
    with torch.random.fork_rng(devices=[0]):
        torch.rand(7, device="cuda")
    second = torch.rand(100, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(100, device="cuda"), first)
    assert torch.equal(torch.rand(100, device="cuda"), second)


def test_a_generator_of_one_s_own_leaves_the_default_one_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(10, device="cuda")
    torch.manual_seed(3)
    own = torch.Generator("cuda").manual_seed(5)
    drawn = torch.rand(10, device="cuda", generator=own)
    assert torch.equal(torch.rand(10, device="cuda"), expected)
    assert torch.equal(torch.rand(10, device="cuda", generator=own.manual_seed(5)), drawn)


def test_dropout_keeps_about_as_many_as_it_says_and_scales_them() -> None:
    out = functional.dropout(torch.ones(100_000, device="cuda"), 0.3)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert abs(out.count_nonzero().item() / 100_000 - 0.7) < 0.02


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_attention_s_backward_pass_uses_the_mask_of_its_forward_pass(backend: SDPBackend) -> None:
    q = torch.rand(1, 2, 8, 8, device="cuda", dtype=torch.float16)
    v = torch.eye(8, device="cuda", dtype=torch.float16).expand(1, 2, 8, 8).clone().requires_grad_(True)
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(
            q, q, v, dropout_p=0.5
        )  # the identity: the kept weights themselves
        out.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, out.detach().sum(-2, keepdim=True).mT.expand_as(v), rtol=2e-2, atol=2e-2)
    assert out.eq(0).any()


def test_a_checkpoint_gives_the_gradients_of_plain_training_bitwise() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.ReLU()).cuda()
    x = torch.rand(8, 10, device="cuda", requires_grad=True)

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(4)
        return torch.autograd.grad(call(x).square().sum(), x)[0]

    plain = gradient(block)
    assert plain.count_nonzero() > 0
    assert torch.equal(gradient(lambda value: checkpoint(block, value, use_reentrant=False)), plain)


# ---- nets ----------------------------------------------------------------------------------------------------------

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU()), (2, 4, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.MaxPool2d(2)), (2, 4, 12, 12)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), nn.AvgPool3d(2)), (2, 2, 6, 6, 6)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 7, 7)),
    "depthwise 3d": (lambda: nn.Conv3d(4, 4, 3, groups=4, padding=1), (2, 4, 5, 5, 5)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 3, 3, stride=2), nn.InstanceNorm2d(3)), (2, 4, 5, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), (2, 4, 5)),
    "norms": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8), nn.LogSigmoid()),
        (3, 8),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
    "upsampling": (
        lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2)),
        (1, 4, 4, 4),
    ),
}


def trained(net: nn.Module, x: Tensor, **optimizer: bool) -> list[Tensor]:
    """Outputs and parameters over three steps of Adam, whose epsilon keeps down gradients that are but rounding."""
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, **optimizer) if list(net.parameters()) else None
    seen = []
    for _ in range(3):
        net.zero_grad()
        out = net(x)
        out.square().mean().backward()
        if adam:
            adam.step()
        seen.append(out.detach().cpu())
    return [*seen, *(value.detach().cpu() for value in net.state_dict().values())]


@pytest.mark.any_kernels
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_training_gives_the_cpu_s_numbers(name: str, kind: str) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    net, x = make(), torch.rand(shape)
    on_device = make().cuda()
    on_device.load_state_dict(net.state_dict())
    expected = trained(net, x.requires_grad_())
    got = trained(on_device, x.detach().cuda().requires_grad_(), **{kind: True})
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_is_near_the_cpu_s_single_precision_and_repeats_itself(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10), nn.LayerNorm(10)
    )
    states = {name: value.clone() for name, value in net.state_dict().items()}
    x, target = torch.rand(4, 3, 8, 8), torch.tensor([1, 3, 5, 7])

    def losses(device: str) -> list[float]:
        net.load_state_dict(states)
        net.to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=64.0, enabled=device == "cuda" and dtype is torch.float16)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast(device, dtype, enabled=device == "cuda"):
                loss = functional.cross_entropy(net(x.to(device)), target.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
        return found

    single, mixed = losses("cpu"), losses("cuda")
    assert mixed == pytest.approx(single, rel=0.05)
    assert mixed != single
    assert losses("cuda") == mixed


def test_a_gradient_that_overflows_is_found_and_its_step_left_out() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.eq(1).all()
    assert scaler.get_scale() == 2.0


# ---- how outputs lie -----------------------------------------------------------------------------------------------


def test_outputs_that_are_given_are_filled_where_they_lie() -> None:
    around = torch.zeros(4, 5, 2, device="cuda")
    a, b = torch.rand(4, 3, device="cuda"), torch.rand(3, 5, device="cuda")
    torch.mm(a, b, out=around[..., 1])
    assert around[..., 0].eq(0).all()
    torch.testing.assert_close(around[..., 1].cpu(), a.cpu() @ b.cpu())


def test_an_output_that_is_too_small_grows() -> None:
    out = torch.empty(0, device="cuda")
    torch.linalg.inv(torch.eye(3, device="cuda") * 2, out=out)
    assert torch.equal(out.cpu(), torch.eye(3) / 2)


def test_numbers_that_the_host_asks_for_are_those_of_the_operator() -> None:
    x = torch.tensor([3, 1, 1, 7], device="cuda")
    assert torch.bincount(x).tolist() == [0, 2, 0, 1, 0, 0, 0, 1]
    assert torch.repeat_interleave(x, x.clamp(max=2)).tolist() == [3, 3, 1, 1, 7, 7]
    assert x[x > 1].tolist() == [3, 7]
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)


def test_scalars_of_the_cpu_and_of_the_device_mix() -> None:
    x = torch.arange(3.0, device="cuda")
    scalar = torch.tensor(2.0)
    out = x * scalar
    scalar.fill_(5)  # the host goes on
    assert out.tolist() == [0, 2, 4]
    assert (x + torch.tensor(1, device="cuda")).tolist() == [1, 2, 3]


def test_an_operator_that_changes_its_input_in_place_reads_what_was_there() -> None:
    x = torch.rand(4, 4, device="cuda") + 3
    expected = torch.mvlgamma(x.cpu(), 1)
    torch.testing.assert_close(x.clone().mvlgamma_(1).cpu(), expected)
    mask = torch.tensor([True, False, True, False], device="cuda")
    y = x.clone()
    y[mask] = -1.0
    assert y[0].eq(-1).all()
    assert torch.equal(y[1], x[1])


def test_what_has_no_numbers_is_refused_by_name() -> None:
    sparse = torch.eye(3, device="cuda").to_sparse()
    with pytest.raises(NotImplementedError, match="the simulated CUDA device has no numbers for aten::"):
        torch.sparse.sum(sparse @ sparse)
