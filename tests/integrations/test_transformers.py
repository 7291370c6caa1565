"""The Trainer of transformers under a budget: same bits, within the budget, and what cannot be combined is refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.errors import UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from pooch.integrations.transformers import PoochCallback  # noqa: E402

pytestmark = pytest.mark.cpu

BUDGET_BYTES = 40 * 2**20


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        remove_unused_columns=False,
        per_device_train_batch_size=6,
        num_train_epochs=2,
        **options,
    )


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = [sample["input_ids"] for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {"input_ids": ids, "labels": ids}


def trained(folder: Path, *callbacks: Any, **options: Any) -> dict[str, torch.Tensor]:
    gc.collect()  # what an earlier training left counts towards the budget
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=200, n_positions=96, n_embd=64, n_layer=3, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    texts = [{"input_ids": torch.randint(200, (length,))} for length in torch.randint(48, 96, (20,)).tolist()]
    trainer = transformers.Trainer(
        model, arguments(folder, **options), data_collator=collate, train_dataset=texts, callbacks=list(callbacks)
    )
    trainer.train()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_a_trainer_computes_the_same_bits_and_the_callback_leaves_nothing_behind(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    callback = PoochCallback(BUDGET_BYTES)
    for _ in range(2):  # one callback serves two trainings
        governed = trained(tmp_path, callback)
        assert all(torch.equal(plain[name], governed[name]) for name in plain)
        summary = callback.summary()
        assert summary.steps == 8, "four batches in each of two epochs, one of them smaller"
        assert summary.steps_on_plan + summary.steps_online > 0, "the budget is one that plain training passes"
        assert summary.peak_bytes <= BUDGET_BYTES


def test_the_last_step_is_in_what_the_trainer_logs(tmp_path: Path) -> None:
    reported: list[dict[str, float]] = []

    class Reporting(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        """As those that report to a file or service: it stands before the callbacks of the user."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            reported.append(dict(logs))
            assert {**logs, "step": state.global_step} == state.log_history[-1]

    trained(tmp_path, Reporting(), PoochCallback(BUDGET_BYTES, quiet=True), logging_steps=4)
    first, second, whole = reported
    assert (first["pooch/steps"], second["pooch/steps"]) == (4, 8)
    assert first["pooch/budget_mib"] == 40
    assert 0 < first["pooch/peak_mib"] <= 40
    assert first["pooch/on_plan"] in (0, 1)
    assert not any(name.startswith("pooch/") for name in whole)  # figures of the whole training


def test_gradient_checkpointing_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UsageError, match="set gradient_checkpointing=False"):
        transformers.Trainer(
            model, arguments(tmp_path, gradient_checkpointing=True), callbacks=[PoochCallback(BUDGET_BYTES)]
        )


def test_a_summary_before_training_is_refused() -> None:
    with pytest.raises(UsageError, match="no training has begun"):
        PoochCallback(BUDGET_BYTES).summary()
