"""Hugging Face's Trainer within a budget: one callback, and nothing else changes."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from pooch_planner.integrations.transformers import PoochCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    """Train a small GPT-2 on random tokens, in batches of different lengths."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=128, n_embd=128, n_layer=4, n_head=4))
    lengths = torch.randint(64, 128, (40,)).tolist()
    texts = [{"input_ids": torch.randint(300, (length,))} for length in lengths]

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad to the longest of the batch."""
        tokens = [sample["input_ids"] for sample in samples]
        labels = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)
        return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}

    pooch = PoochCallback("80MiB")
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(model, arguments, data_collator=collate, train_dataset=texts, callbacks=[pooch])  # type: ignore[arg-type]
        trainer.train()
    print(pooch.summary())


if __name__ == "__main__":
    main()
