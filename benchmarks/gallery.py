"""Draw the pictures of docs/gallery.md, and write what stands beside them.

    python -m benchmarks.gallery

Plans the profiles that the repository holds, which needs neither PyTorch nor the machine that they were made on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pooch
from benchmarks.tables import tell
from pooch.ground.units import format_bytes
from pooch.ir.files import replace_file

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/gallery.md"
PICTURES = ROOT / "docs/gallery"


@dataclass(frozen=True)
class Piece:
    """One picture: a profile under a budget, and what to look for in it."""

    profile: str
    budget: str
    title: str
    about: str

    @property
    def name(self) -> str:
        return self.profile.partition("-")[0]


PIECES = (
    Piece(
        "resnet50-b16-cpu", "60%", "A convolutional network",
        "Normalizations and activation functions are cheap to run again, so most of what leaves is recomputed.",
    ),
    Piece(
        "unet3d-b2-cpu", "60%", "A 3D U-Net with long skips",
        "Four values leave by copy early and come back while others are recomputed.",
    ),
    Piece(
        "lstm-b32-cpu", "60%", "A recurrent network",
        "It has few ops, and large ones: two layers are run again, and nothing is copied.",
    ),
    Piece(
        "gpt2-b1-cpu", "60%", "A transformer",
        "Blocks use both ways: what is cheap to run again is recomputed, and the rest of what leaves is copied.",
    ),
)  # fmt: skip


def section(piece: Piece) -> str:
    """Plan a piece and draw it; return its section of the page."""
    tell(f"{piece.name} at {piece.budget}")
    path = f"profiles/{piece.profile}.json"
    profile = pooch.Profile.load(ROOT / path)
    plan = pooch.plan(profile, piece.budget, region="step", effort="fast")
    plan.plot(profile, PICTURES / f"{piece.name}.png")
    step = pooch.simulate(profile, plan)
    choices = plan.to_frame()["choice"].value_counts()
    counted = ", ".join(f"{choices.get(choice, 0)} {text}" for choice, text in WORDS.items())
    return (
        f"## {piece.title}\n\n{piece.about} Predicted: {format_bytes(step.peak_bytes)} instead of "
        f"{format_bytes(profile.peak_bytes)}; activations: {counted}.\n\n"
        f"```console\n$ pooch plan {path} --budget {piece.budget} --region step --effort fast -o plan.json\n"
        f"$ pooch show plan.json --profile {path} --plot {piece.name}.png\n```\n\n"
        f"![Memory and streams of a step of {piece.name} at {piece.budget}](gallery/{piece.name}.png)\n"
    )


WORDS = {"keep": "kept", "swap": "swapped", "recompute": "recomputed"}
HEAD = """# Gallery

What plans look like for different kinds of models. Each picture is made by the commands above it from a profile that
the repository holds, so you can make it yourself without training anything; `python -m benchmarks.gallery` makes all of
them. Scripts to run are in `examples/`; `pooch exec --report` draws a run of your own.
"""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    replace_file(PAGE, "\n".join([HEAD, *map(section, PIECES)]).encode())


if __name__ == "__main__":
    main()
