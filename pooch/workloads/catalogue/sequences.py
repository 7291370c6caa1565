"""Language and sequence models: sizes of Meng et al. 2017 and of the TensorFlow while-loop comparison.

Meng et al. give layers, lengths and largest batches. Widths, and the language model's length and vocabulary, are not in
the available text: a width of 1500, 35 steps and 10,000 words are those of the large PTB model (Zaremba et al. 2014),
which agree with the bytes per layer that their largest batches suggest; for the translator, a width of 1024 does.
"""

from __future__ import annotations

from ..registry import BATCH_SIZE, BuiltIn, Growth, Preset, small
from ..settings import Setting

_MODELS = __package__.replace("catalogue", "models")
_LENGTH = Growth("sequence_length")
_LAYERS = Growth("layers")
_PTB: dict[str, Setting] = {"sequence_length": 35, "width": 1500, "vocabulary": 10000, "dropout": 0.0, "unrolled": True}


def _meng_lstm(layers: int, batch_size: int, stock: int) -> Preset:
    note = f"Meng et al. 2017: largest batch in 12 GB (stock: {stock}); width, length and vocabulary assumed"
    return Preset(f"meng-{layers}", {"batch_size": batch_size, "layers": layers, **_PTB}, note)


SEQUENCES = (
    BuiltIn(
        "gpt2",
        "GPT-2 small language model, AdamW",
        f"{_MODELS}.gpt2",
        "transformers",
        source="Radford et al. 2019",
        growths=(BATCH_SIZE, _LENGTH, _LAYERS),
        presets=(
            small(batch_size=2, sequence_length=64, layers=3, width=64, heads=4, vocabulary=500),
            Preset(
                "medium", {"batch_size": 8, "layers": 24, "width": 1024, "heads": 16}, "Radford et al. 2019: medium"
            ),
            Preset("xl", {"batch_size": 1, "layers": 48, "width": 1600, "heads": 25}, "Radford et al. 2019: XL"),
        ),
    ),
    BuiltIn(
        "llama",
        "Llama-style language model as large as GPT-2 small, AdamW",
        f"{_MODELS}.llama",
        "transformers",
        source="Touvron et al. 2023",
        growths=(BATCH_SIZE, _LENGTH, _LAYERS),
        presets=(
            small(
                batch_size=4,
                sequence_length=64,
                layers=3,
                width=64,
                inner_width=192,
                heads=4,
                key_value_heads=2,
                vocabulary=500,
            ),
            Preset(
                "7b",
                {
                    "batch_size": 1,
                    "sequence_length": 2048,
                    "layers": 32,
                    "width": 4096,
                    "inner_width": 11008,
                    "heads": 32,
                    "key_value_heads": 32,
                },
                "Touvron et al. 2023: 7B",
            ),
        ),
    ),
    BuiltIn(
        "lstm",
        "three-layer LSTM language model (--set unrolled=true: op by op), Adam",
        f"{_MODELS}.lstm",
        source="Zaremba et al. 2014",
        growths=(BATCH_SIZE, _LENGTH, _LAYERS),
        presets=(
            small(batch_size=128, sequence_length=8, vocabulary=50, width=32, layers=2, unrolled=True),
            Preset(
                "small-fused",
                {"batch_size": 8, "sequence_length": 32, "vocabulary": 100, "width": 64, "layers": 3},
                "for tests",
            ),
            _meng_lstm(1, 3000, 1800),
            _meng_lstm(4, 1500, 750),
            _meng_lstm(8, 900, 350),
            _meng_lstm(16, 280, 75),
        ),
    ),
)
