"""Scripts of Hugging Face, TRL, PEFT, Accelerate and Lightning, written from their documentation, with random data."""

from __future__ import annotations

import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops.loop import Loop, loop
from benchmarks.setups import with_lightning
from benchmarks.setups.with_transformers import (
    WORDS,
    Texts,
    arguments_for,
    made_texts,
    made_tokenizer,
    padded,
    recorded,
    tiny_bert,
    tiny_gpt2,
    watching,
)  # fmt: skip

TRANSFORMERS, TRL, LIGHTNING, PEFT, ACCELERATE = "transformers", "trl", "lightning", "peft", "accelerate"


def _trained(run: Loop, trainer_class: type, model: nn.Module, data: Any, collator: Any, **options: Any) -> None:
    """Train, evaluate and look at what would be saved, as the `run_...` scripts do."""
    held_out = options.pop("held_out", None)
    with TemporaryDirectory() as folder:
        usual = {"per_device_train_batch_size": 12, "num_train_epochs": 2} | options
        if held_out is not None:
            usual["eval_strategy"] = "epoch"
        trainer = recorded(trainer_class, run)(  # type: ignore[arg-type]
            model=model,
            args=arguments_for(folder, **usual),
            train_dataset=data,
            eval_dataset=held_out,
            data_collator=collator,
            callbacks=[*run.callbacks(TRANSFORMERS), watching(run)],  # type: ignore[arg-type]
        )
        trainer.train()
        run.state("parameters", trainer.model)


@loop(TRANSFORMERS)
def run_clm(run: Loop) -> None:
    """Texts joined and cut into blocks of one size, as `group_texts` does."""
    from transformers import Trainer, default_data_collator

    joined = torch.randint(WORDS, (70 * 96,)).view(-1, 96)
    blocks = [{"input_ids": block, "labels": block.clone()} for block in joined]
    options = {"learning_rate": 5e-5, "weight_decay": 0.01, "warmup_steps": 2}
    _trained(run, Trainer, tiny_gpt2(), blocks[:58], default_data_collator, held_out=blocks[58:], **options)


@loop(TRANSFORMERS)
def run_mlm(run: Loop) -> None:
    """Words masked at random by the collator, other lengths in every batch."""
    from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer

    tokenizer = made_tokenizer(made_texts(20))
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    shape = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=128, **shape))
    texts = [{"input_ids": each["input_ids"]} for each in Texts(80)]  # type: ignore[attr-defined]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    _trained(run, Trainer, model, texts[:66], collator, held_out=texts[66:])


@loop(TRANSFORMERS)
def run_glue(run: Loop) -> None:
    """Classification with dynamic padding, accumulation, clipping and a metric."""
    from transformers import Trainer

    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine"}
    _trained(run, Trainer, tiny_bert(), Texts(120, labels=3), padded, held_out=Texts(20, labels=3), **options)


@loop(TRANSFORMERS)
def run_clm_no_trainer(run: Loop) -> None:
    """The loop of `run_clm_no_trainer.py` with Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import get_scheduler

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_gpt2()
    decayed = [p for name, p in model.named_parameters() if not name.endswith(("bias", "ln_f.weight"))]
    rest = [p for name, p in model.named_parameters() if name.endswith(("bias", "ln_f.weight"))]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    data = DataLoader(Texts(90), 12, shuffle=True, collate_fn=padded)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=8)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    run.governs(model, optimizer)
    for _ in range(2):
        model.train()
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.step(loss)
    run.state("parameters", accelerator.unwrap_model(model))


@loop(TRANSFORMERS)
def run_translation(run: Loop) -> None:
    """T5, an encoder and a decoder, and label smoothing."""
    from transformers import T5Config, T5ForConditionalGeneration, Trainer

    config = T5Config(vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, pad_token_id=0)
    config.decoder_start_token_id = 0
    _trained(run, Trainer, T5ForConditionalGeneration(config), Texts(90), padded, label_smoothing_factor=0.1)


@loop(PEFT)
def peft_lora(run: Loop) -> None:
    """A loop by hand over a model with adapters, merged in the end."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_gpt2(), config)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    run.governs(model, optimizer)
    for batch in DataLoader(Texts(100), 10, collate_fn=padded):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    run.state("merged", model.merge_and_unload())


def _by_trl(run: Loop, trainer_class: type, config_class: type, data: Any, model: nn.Module, **options: Any) -> None:
    """Train with one of TRL's trainers. What it takes besides stands in `options`: those of its settings in "args"."""
    with TemporaryDirectory() as folder:
        usual: dict[str, Any] = {
            "output_dir": folder, "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0, "bf16": False,
            "save_strategy": "no", "per_device_train_batch_size": 8, "num_train_epochs": 1, "logging_steps": 1,
            "gradient_checkpointing": False,
        }  # fmt: skip
        trainer = recorded(trainer_class, run)(  # type: ignore[arg-type]
            model=model,
            args=config_class(**(usual | options.pop("args", {}))),
            train_dataset=data,
            callbacks=[*run.callbacks(TRANSFORMERS), watching(run)],  # type: ignore[arg-type]
            **options,
        )
        trainer.train()
        run.state("parameters", trainer.model)


@loop(TRL)
def trl_sft(run: Loop) -> None:
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    texts = made_texts(80)
    data = Dataset.from_dict({"text": texts})
    _by_trl(
        run, SFTTrainer, SFTConfig, data, tiny_gpt2(), processing_class=made_tokenizer(texts), args={"max_length": 96}
    )


def _preferences(count: int) -> tuple[Any, Any]:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    texts = [[each[:200] for each in made_texts(count)] for _ in range(3)]
    columns = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
    return Dataset.from_dict(columns), made_tokenizer([text for each in texts for text in each])


@loop(TRL)
def trl_dpo(run: Loop) -> None:
    from trl import DPOConfig, DPOTrainer

    data, tokenizer = _preferences(64)
    model = tiny_gpt2()
    settings, reference = {"max_length": 96}, copy.deepcopy(model)
    _by_trl(run, DPOTrainer, DPOConfig, data, model, processing_class=tokenizer, ref_model=reference, args=settings)


@loop(TRL)
def trl_dpo_lora(run: Loop) -> None:
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    data, tokenizer = _preferences(64)
    lora = LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM")
    _by_trl(run, DPOTrainer, DPOConfig, data, tiny_gpt2(), processing_class=tokenizer, peft_config=lora)


@loop(TRL)
def trl_reward(run: Loop) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    data, tokenizer = _preferences(64)
    shape = {"n_positions": 160, "n_embd": 96, "n_layer": 3, "n_head": 4}
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=WORDS, num_labels=1, pad_token_id=0, **shape))
    _by_trl(run, RewardTrainer, RewardConfig, data, model, processing_class=tokenizer)


@loop(TRL)
def trl_grpo(run: Loop) -> None:
    from trl import GRPOConfig, GRPOTrainer

    data, tokenizer = _preferences(24)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    settings = {"num_generations": 4, "max_completion_length": 24, "beta": 0.04}
    _by_trl(
        run, GRPOTrainer, GRPOConfig, data.remove_columns(["chosen", "rejected"]), tiny_gpt2(),
        processing_class=tokenizer, reward_funcs=reward, args=settings,
    )  # fmt: skip


@loop(ACCELERATE)
def accelerate_nlp_example(run: Loop) -> None:
    """bf16, accumulation, a schedule, evaluation with gathered predictions."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 20))
    train = DataLoader(Texts(90, labels=3), 12, shuffle=True, collate_fn=padded)
    test = DataLoader(Texts(20, labels=3), 10, collate_fn=padded)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    run.governs(model, optimizer)
    for _ in range(2):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.step(loss)
        model.eval()
        for batch in test:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            found, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            run.value("correct", (found == labels).sum())
    run.state("parameters", accelerator.unwrap_model(model))


def _fitted(run: Loop, module: Any, data: Any, **options: Any) -> None:
    callbacks = [*run.callbacks(LIGHTNING), with_lightning.watching(run)]  # type: ignore[arg-type]
    with_lightning.made_trainer(callbacks, **options).fit(module, data)
    run.state("parameters", module)


@loop(LIGHTNING)
def lightning_autoencoder(run: Loop) -> None:
    """The first example of Lightning's documentation."""
    import lightning

    class LitAutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            x = batch[0].view(len(batch[0]), -1)
            loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    _fitted(run, LitAutoEncoder(), DataLoader(TensorDataset(torch.rand(3000, 1, 28, 28)), 512), max_epochs=2)


@loop(LIGHTNING)
def lightning_gan(run: Loop) -> None:
    """Manual optimization with `toggle_optimizer`, as in the GAN tutorial."""
    import lightning

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(
                nn.Linear(32, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2, inplace=True), nn.Linear(128, 784), nn.Tanh()
            )
            self.discriminator = nn.Sequential(
                nn.Linear(784, 128), nn.LeakyReLU(0.2, inplace=True), nn.Linear(128, 64),
                nn.LeakyReLU(0.2, inplace=True), nn.Linear(64, 1), nn.Sigmoid(),
            )  # fmt: skip

        def training_step(self, batch: list[Tensor], _: int) -> None:
            images = batch[0].flatten(1)
            of_generator, of_discriminator = self.optimizers()
            z, ones = torch.randn(len(images), 32), torch.ones(len(images), 1)
            self.toggle_optimizer(of_generator)
            g_loss = nn.functional.binary_cross_entropy(self.discriminator(self.generator(z)), ones)
            self.manual_backward(g_loss)
            of_generator.step()
            of_generator.zero_grad()
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_discriminator)
            real = nn.functional.binary_cross_entropy(self.discriminator(images), ones)
            fake = nn.functional.binary_cross_entropy(self.discriminator(self.generator(z).detach()), 0 * ones)
            d_loss = (real + fake) / 2
            self.manual_backward(d_loss)
            of_discriminator.step()
            of_discriminator.zero_grad()
            self.untoggle_optimizer(of_discriminator)
            run.value("losses", g_loss)
            run.value("losses", d_loss)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            parts = (self.generator, self.discriminator)
            return [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts]

    _fitted(run, Gan(), DataLoader(TensorDataset(torch.rand(3000, 1, 28, 28)), 512), max_epochs=2)
