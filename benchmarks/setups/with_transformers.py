"""Hugging Face: Trainer, TRL's SFTTrainer with PEFT, Accelerate. Random weights and data; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.setups.nets import conv_net, pictures
from benchmarks.setups.setup import setup
from benchmarks.setups.way import Way

WORDS = 300


def tiny_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=128, n_embd=128, n_layer=4, n_head=4))


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=128,
            num_labels=3,
        )
    )


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token sequences of different lengths, with a label each."""

    def __init__(self, count: int, longest: int = 120, labels: int | None = None) -> None:
        lengths = torch.randint(longest // 3, longest, (count,)).tolist()
        self.tokens = [torch.randint(4, WORDS, (length,)) for length in lengths]
        self.labels = None if labels is None else torch.randint(labels, (count,))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = {"input_ids": self.tokens[index]}
        return found if self.labels is None else {**found, "labels": self.labels[index]}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest sequence, as DataCollatorWithPadding makes it."""
    tokens = [sample["input_ids"] for sample in samples]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
    if "labels" in samples[0]:
        labels = torch.stack([sample["labels"] for sample in samples])
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def recorded(trainer_class: type, way: Way) -> type:
    """A Trainer that writes losses and steps into the record."""

    class Recorded(trainer_class):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*arguments, **options)
            way.record.value("loss", loss)
            return loss

    return Recorded


def watching(way: Way) -> Any:
    """A callback that tells the record when training begins and when a step ends."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            way.record.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            way.record.step()

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            way.record.value("validation", metrics["eval_loss"])

    return Watching()


def arguments_for(folder: str, **options: Any) -> Any:
    """TrainingArguments that write nothing but checkpoints."""
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "output_dir": folder, "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0, "logging_steps": 1,
        "save_strategy": "no", "dataloader_num_workers": 0, "remove_unused_columns": False, "learning_rate": 1e-3,
    }  # fmt: skip
    return TrainingArguments(**(defaults | options))


def checkpoint_of(folder: Path) -> dict[str, Any]:
    """Model and optimizer of a checkpoint that a Trainer wrote."""
    from safetensors.torch import load_file

    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    return {"model": load_file(folder / "model.safetensors"), "optimizer": optimizer}


@setup("Trainer: GPT-2, dynamic padding, a smaller last batch, clipping, evaluation", needs="transformers")
def trainer_gpt2(way: Way) -> None:
    from transformers import Trainer

    with TemporaryDirectory() as folder:
        trainer = recorded(Trainer, way)(
            model=tiny_gpt2(),
            args=arguments_for(
                folder, per_device_train_batch_size=12, num_train_epochs=3, max_grad_norm=0.5, eval_strategy="epoch"
            ),
            train_dataset=Texts(66),
            eval_dataset=Texts(20),
            data_collator=padded,
            callbacks=[*way.transformers_callbacks(), watching(way)],
        )
        trainer.train()
        way.record.state("parameters", trainer.model)


@setup("Trainer: BERT, bf16 autocast, accumulation over two batches, dropout", needs="transformers")
def trainer_bert_bfloat16(way: Way) -> None:
    from transformers import Trainer

    with TemporaryDirectory() as folder:
        trainer = recorded(Trainer, way)(
            model=tiny_bert(),
            args=arguments_for(
                folder, per_device_train_batch_size=12, num_train_epochs=3, bf16=True, gradient_accumulation_steps=2
            ),
            train_dataset=Texts(115, labels=3),
            data_collator=padded,
            callbacks=[*way.transformers_callbacks(), watching(way)],
        )
        trainer.train()
        way.record.state("parameters", trainer.model)


@setup("Trainer: checkpoints, and training resumed from one with a new model and a new Trainer", needs="transformers")
def trainer_resumed(way: Way) -> None:
    from transformers import Trainer

    texts = Texts(96)
    with TemporaryDirectory() as folder:
        callbacks = way.transformers_callbacks()
        for resume in (None, f"{folder}/checkpoint-8"):
            trainer = recorded(Trainer, way)(
                model=tiny_gpt2(),
                args=arguments_for(
                    folder, per_device_train_batch_size=12, num_train_epochs=2, save_strategy="steps", save_steps=8
                ),
                train_dataset=texts,
                data_collator=padded,
                callbacks=[*callbacks, watching(way)],
            )
            trainer.train(resume_from_checkpoint=resume)
            way.record.state("checkpoint 8", checkpoint_of(Path(folder, "checkpoint-8")))
            way.record.state("checkpoint 16", checkpoint_of(Path(folder, "checkpoint-16")))
            way.record.state("parameters", trainer.model)


@setup(
    "Trainer: dynamic padding, a smaller last batch, bf16 autocast, accumulation, clipping, evaluation, and training "
    "resumed from a checkpoint, all in one script",
    needs="transformers",
)
def trainer_everything(way: Way) -> None:
    from transformers import Trainer

    texts, held_out = Texts(54), Texts(12)
    with TemporaryDirectory() as folder:
        callbacks = way.transformers_callbacks()
        for resume in (None, f"{folder}/checkpoint-3"):
            trainer = recorded(Trainer, way)(
                model=tiny_gpt2(),
                args=arguments_for(
                    folder,
                    per_device_train_batch_size=12,
                    gradient_accumulation_steps=2,
                    num_train_epochs=3,
                    max_grad_norm=0.5,
                    bf16=True,
                    eval_strategy="epoch",
                    save_strategy="steps",
                    save_steps=3,
                ),
                train_dataset=texts,
                eval_dataset=held_out,
                data_collator=padded,
                callbacks=[*callbacks, watching(way)],
            )
            trainer.train(resume_from_checkpoint=resume)
            for step in (3, 6, 9):
                way.record.state(f"checkpoint {step}", checkpoint_of(Path(folder, f"checkpoint-{step}")))
            way.record.state("parameters", trainer.model)


@setup("Trainer on two ranks under DDP: GPT-2, dynamic padding, clipping", needs="transformers", ranks=2)
def trainer_two_ranks(way: Way) -> None:
    from transformers import Trainer

    with TemporaryDirectory() as folder:
        trainer = recorded(Trainer, way)(
            model=tiny_gpt2(),
            args=arguments_for(
                folder, per_device_train_batch_size=8, num_train_epochs=3, max_grad_norm=0.5, ddp_backend="gloo"
            ),
            train_dataset=Texts(90),
            data_collator=padded,
            callbacks=[*way.transformers_callbacks(), watching(way)],
        )
        trainer.train()
        way.record.state("parameters", trainer.model)


def made_tokenizer(texts: list[str]) -> Any:
    """A tokenizer of the words of some texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    words = [*special, *sorted({word for text in texts for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def made_texts(count: int) -> list[str]:
    """Random words, of different lengths."""
    lengths = torch.randint(40, 110, (count,)).tolist()
    return [" ".join(f"word{n}" for n in torch.randint(250, (length,)).tolist()) for length in lengths]


@setup("TRL's SFTTrainer with LoRA adapters of PEFT", needs="trl")
def sft_lora(way: Way) -> None:
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    texts = made_texts(96)
    with TemporaryDirectory() as folder:
        trainer = recorded(SFTTrainer, way)(
            model=tiny_gpt2(),
            args=SFTConfig(
                output_dir=folder,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
                save_strategy="no",
                bf16=False,
                per_device_train_batch_size=12,
                num_train_epochs=2,
                max_length=128,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=made_tokenizer(texts),
            peft_config=LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.05, task_type="CAUSAL_LM"),
            callbacks=[*way.transformers_callbacks(), watching(way)],
        )
        trainer.train()
        way.record.state("parameters", trainer.model)


def accelerated(way: Way, *, wrap_first: bool) -> None:
    """Accelerate with accumulation and bf16, Pooch given the prepared model or the bare one."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = conv_net()
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(pictures(150), torch.randint(10, (150,))), batch_size=16)
    if not wrap_first:
        way.auto(model, optimizer)
    prepared, optimizer, data = accelerator.prepare(model, optimizer, data)
    if wrap_first:
        way.auto(prepared, optimizer)
    for _ in range(2):
        for images, labels in data:
            with accelerator.accumulate(prepared):
                with accelerator.autocast():
                    loss = nn.functional.cross_entropy(prepared(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            way.record.step(loss)
    way.record.state("parameters", accelerator.unwrap_model(prepared))


@setup("Accelerate: bf16, accumulation and clipping, the prepared model", needs="accelerate")
def accelerate_prepared(way: Way) -> None:
    accelerated(way, wrap_first=True)


@setup("Accelerate: the same, Pooch given the model before `prepare`", needs="accelerate")
def accelerate_before_prepare(way: Way) -> None:
    accelerated(way, wrap_first=False)
