"""Profiles of the shape and size of real networks, told to the toy builder: for planning times and gaps."""

from __future__ import annotations

from pooch.ir import Link, Profile
from tests.toys import ToyStep

MIB = 1 << 20
SPILL_FILE = Link("spill file", 0.1, 0.1, 1.5e6, 2.0e6, full_duplex=False, out_compute_share=0.2, in_compute_share=0.2)
PCIE_16 = Link("pinned host memory", 0.02, 0.02, 12e6, 12e6)


class _Network:
    """Tells ops with a time that follows from bytes (memory-bound) or from arithmetic (compute-bound)."""

    def __init__(self, bytes_per_ms: float, work_per_ms: float) -> None:
        self.step = ToyStep(round_bytes=512)
        self.bytes_per_ms, self.work_per_ms = bytes_per_ms, work_per_ms

    def heavy(self, reads: list[int], size_bytes: int, work: float, workspace_bytes: int = 0) -> int:
        """A convolution or matrix product: saves its input, its backward takes twice its time."""
        weight = self.step.parameter(max(4096, size_bytes // 50))
        time_ms = work / self.work_per_ms
        (made,) = self.step.op(
            [*reads, weight], [size_bytes], saves=reads, time_ms=time_ms, backward_ms=2 * time_ms,
            workspace_bytes=workspace_bytes, gradient_bytes=size_bytes, name="heavy",
        )  # fmt: skip
        return made

    def light(self, reads: list[int], size_bytes: int, *, saves: list[int], save_output: bool = False) -> int:
        """A normalisation or activation: its time is that of moving its bytes."""
        time_ms = 2 * size_bytes / self.bytes_per_ms
        (made,) = self.step.op(
            reads, [size_bytes], saves=saves, saves_outputs=[0] if save_output else [], time_ms=time_ms,
            backward_ms=1.5 * time_ms, gradient_bytes=size_bytes, name="light",
        )  # fmt: skip
        return made

    def in_place(self, target: int, *, save_output: bool) -> int:
        """An op that writes over its input, such as ReLU(inplace=True)."""
        size_bytes = self.step.values[target].size_bytes
        (made,) = self.step.op(
            [target], [0], overwrites=target, saves_outputs=[0] if save_output else [],
            time_ms=size_bytes / self.bytes_per_ms, backward_ms=2 * size_bytes / self.bytes_per_ms,
            name="in_place",
        )  # fmt: skip
        return made

    def normalised(self, value: int, size_bytes: int, *, activate: bool) -> int:
        """Batch normalisation (with small saved statistics), and an in-place ReLU behind it."""
        outputs = self.step.op(
            [value], [size_bytes, 1024], saves=[value], saves_outputs=[1], time_ms=2 * size_bytes / self.bytes_per_ms,
            backward_ms=4 * size_bytes / self.bytes_per_ms, gradient_bytes=size_bytes, name="normalised",
        )  # fmt: skip
        self.step.too_small(outputs[1])
        return self.in_place(outputs[0], save_output=True) if activate else outputs[0]


def resnet50(batch_size: int = 32, link: Link = SPILL_FILE, speed: float = 1.0) -> Profile:
    """Bottleneck blocks of 3, 4, 6, 3; at speed 1 as on a CPU, at speed 50 about as on a GPU."""
    network = _Network(bytes_per_ms=8e6 * speed, work_per_ms=0.15e9 * speed)
    image = network.step.external(batch_size * 3 * 224 * 224 * 4)

    def conv(value: int, channels_in: int, channels: int, side: int, kernel: int) -> int:
        size_bytes = batch_size * channels * side * side * 4
        work = batch_size * side * side * channels * channels_in * kernel * kernel * 1.0
        return network.heavy([value], size_bytes, work, workspace_bytes=size_bytes // 4)

    def conv_norm(value: int, channels_in: int, channels: int, side: int, kernel: int, activate: bool = True) -> int:
        made = conv(value, channels_in, channels, side, kernel)
        return network.normalised(made, batch_size * channels * side * side * 4, activate=activate)

    current = conv_norm(image, 3, 64, 112, 7)
    current = network.light([current], batch_size * 64 * 56 * 56 * 4, saves=[current])
    channels_in = 64
    for stage, (count, width, side) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)]):
        for block in range(count):
            inner_side = side * 2 if block == 0 and stage > 0 else side
            size_bytes = batch_size * 4 * width * side * side * 4
            inner = conv_norm(current, channels_in, width, inner_side, 1)
            inner = conv_norm(inner, width, width, side, 3)
            outer = conv_norm(inner, width, 4 * width, side, 1, activate=False)
            skip = conv_norm(current, channels_in, 4 * width, side, 1, activate=False) if block == 0 else current
            total = network.light([outer, skip], size_bytes, saves=[])
            current = network.in_place(total, save_output=True)
            channels_in = 4 * width
    pooled = network.light([current], batch_size * 2048 * 4, saves=[current])
    network.heavy([pooled], batch_size * 1000 * 4, batch_size * 2e6)
    return network.step.build(link, persistent_bytes=300 * MIB, workload="resnet50")


def gpt2(
    layers: int = 12,
    batch_size: int = 4,
    width: int = 768,
    link: Link = SPILL_FILE,
    speed: float = 1.0,
    fine: bool = False,
) -> Profile:
    """Transformer blocks with dropout that can be replayed, 1024 tokens, and a head of 50,257 words.

    Args:
        fine: behind each matrix product three more ops that save something, so 27 activations a layer and not 13.
    """
    network = _Network(bytes_per_ms=8e6 * speed, work_per_ms=0.15e9 * speed)
    tokens, heads = 1024, width // 64
    hidden = batch_size * tokens * width * 4
    scores = batch_size * heads * tokens * tokens * 4
    current = network.step.external(hidden)
    current = network.light([current], hidden, saves=[])

    def project(value: int, times: int, of: int = 1) -> int:
        made = network.heavy([value], hidden * times, batch_size * tokens * float(width) * width * times * of)
        if fine:
            scaled = network.light([made], hidden * times, saves=[made])
            shifted = network.light([scaled], hidden * times, saves=[], save_output=True)
            made = network.light([shifted], hidden * times, saves=[], save_output=True)
        return made

    for _ in range(layers):
        normal = network.light([current], hidden, saves=[current])
        query, key, value = (project(normal, 1) for _ in range(3))
        score = network.heavy([query, key], scores, batch_size * tokens * float(tokens) * width)
        scaled = network.light([score], scores, saves=[])
        weights = network.light([scaled], scores, saves=[], save_output=True)
        mask = network.light([weights], scores // 4, saves=[], save_output=True)
        dropped = network.light([weights, mask], scores, saves=[])
        mixed = network.heavy([dropped, value], hidden, batch_size * tokens * float(tokens) * width)
        attended = network.light([project(mixed, 1)], hidden, saves=[])
        current = network.light([current, attended], hidden, saves=[])
        normal = network.light([current], hidden, saves=[current])
        wide = project(normal, 4)
        active = network.light([wide], 4 * hidden, saves=[wide])
        narrow = network.light([project(active, 1, of=4)], hidden, saves=[])
        current = network.light([current, narrow], hidden, saves=[])
    last = network.light([current], hidden, saves=[current])
    words = batch_size * tokens * 50257 * 4
    logits = network.heavy([last], words, batch_size * tokens * float(width) * 50257)
    network.light([logits], words, saves=[], save_output=True)
    return network.step.build(link, persistent_bytes=1500 * MIB, workload="gpt2")
