"""Stock programs of Transformers' Trainer and of TRL over a ring of 2 end with the weights that they have on one process."""

import importlib

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.stock import over, run_program, save, saved, settings, texts, weights, word_tokenizer
from tests.support.tolerance import distance
from tests.support.training import SIZES, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")

#: Of final weights, relative to the largest weight of each; the programs compute in float64 where they can.
BOUND = 1e-6


def language(folder, make=tiny_llama):
    return saved(folder, LlamaForCausalLM, make)


def tokens(count=8):
    tokenizer = word_tokenizer()
    return texts(count, "text").map(
        lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"]
    )


def finished(trainer):
    """The weights after training, and its log."""
    trainer.train()
    logs = [
        {name: x for name, x in entry.items() if isinstance(x, float) and "time" not in name and "_per_" not in name}
        for entry in trainer.state.log_history
    ]
    return weights(trainer.model), logs


# ---- Transformers' Trainer


def language_model(folder, ring_size, **changes):
    kind, ring = over(Trainer, ring_size)
    collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
    args = TrainingArguments(**settings(folder, **changes))
    return finished(kind(language(folder), args, train_dataset=tokens(), data_collator=collator, **ring))


def label_smoothing(folder, ring_size):
    return language_model(folder, ring_size, label_smoothing_factor=0.1)


def accumulated(folder, ring_size):
    return language_model(folder, ring_size, gradient_accumulation_steps=2, batch_size=1)


def accuracy(prediction):
    best, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((best == labels)[labels != -100].mean()), "rows": float(len(best))}


def with_metrics(folder, ring_size):
    """Evaluates in an uneven number of batches, and ends with the best checkpoint."""
    kind, ring = over(Trainer, ring_size)
    collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
    changes = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "steps": 4}
    changes |= {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "accuracy",
        "greater_is_better": True,
    }
    args = TrainingArguments(**settings(folder, **changes))
    data = {"train_dataset": tokens(), "eval_dataset": tokens(5)}
    return finished(kind(language(folder), args, **data, data_collator=collator, compute_metrics=accuracy, **ring))


class FocalTrainer(Trainer):
    """A loss of its own, from logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        output = model(**inputs)
        logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        nll = torch.nn.functional.cross_entropy(logits, targets.clamp(min=0), reduction="none")
        loss = ((1 - (-nll).exp()) ** 2 * nll)[targets != -100].mean()
        return (loss, output) if return_outputs else loss


def own_loss(folder, ring_size):
    kind, ring = over(FocalTrainer, ring_size)
    collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
    return finished(
        kind(
            language(folder),
            TrainingArguments(**settings(folder)),
            train_dataset=tokens(),
            data_collator=collator,
            **ring,
        )
    )


def classifier_model(pattern=None):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=3, pad_token_id=90, attn_implementation="ring_dilated")
    return LlamaForSequenceClassification(config).to(torch.get_default_dtype())


def classifier(folder, ring_size):
    kind, ring = over(Trainer, ring_size)
    rows = tokens().map(lambda row: {"labels": len(row["input_ids"]) % 3})
    model, tokenizer = saved(folder, LlamaForSequenceClassification, classifier_model), word_tokenizer()
    args = TrainingArguments(**settings(folder))

    def right(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = kind(model, args, train_dataset=rows, processing_class=tokenizer, compute_metrics=right, **ring)
    trained = finished(trainer)
    predictions = trainer.predict(rows).predictions
    return trained[0] | {"predictions": torch.from_numpy(np.asarray(predictions))}, trained[1]


def resumed(folder, ring_size):
    """Goes on in the middle of an epoch, from the checkpoint after step 2 of 6; an epoch has 4 steps."""
    kind, ring = over(Trainer, ring_size)
    collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
    args = settings(folder, steps=6, save_strategy="steps", save_steps=2)
    data = {"train_dataset": tokens(), "data_collator": collator}
    whole = finished(kind(language(folder), TrainingArguments(**args), **data, **ring))
    again = kind(language(folder), TrainingArguments(**args), **data, **ring)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    for name, x in weights(again.model).items():
        assert torch.equal(x, whole[0][name]), name
    return whole


# ---- Accelerate


def accelerate_loop(folder, ring_size):
    """A loop with accumulation and a schedule, which goes on in the middle of an epoch from what it has saved."""

    def begun():
        settings = DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=settings)
        ring = None if ring_size is None else ra.Ring.from_accelerator(accelerator, ring_size)
        model = ra.patch_model(language(folder), ring=ring)
        collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
        torch.manual_seed(3)
        loader = DataLoader(tokens(16), 2, shuffle=True, collate_fn=collator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = get_scheduler("linear", optimizer, 1, 8)
        return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)

    def train(accelerator, model, optimizer, loader, schedule, batches, save_after=None):
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if number + 1 == save_after:
                accelerator.save_state(f"{folder}/state")
        return weights(accelerator.unwrap_model(model))

    parts = begun()
    whole = train(*parts, parts[3], save_after=4)
    parts = begun()
    parts[0].load_state(f"{folder}/state")
    again = train(*parts, parts[0].skip_first_batches(parts[3], 4))
    for name, x in whole.items():
        assert torch.equal(x, again[name]), name
    return whole, []


# ---- TRL


def trl(name):
    module = importlib.import_module("trl")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def sft(folder, ring_size, **changes):
    trainer, config = trl("SFT")
    kind, ring = over(trainer, ring_size)
    args = config(**settings(folder, max_length=32, **changes))
    return finished(
        kind(language(folder), args, train_dataset=texts(12, "text"), processing_class=word_tokenizer(), **ring)
    )


def sft_packed(folder, ring_size):
    return sft(folder, ring_size, packing=True)


def sft_completions(folder, ring_size):
    trainer, config = trl("SFT")
    kind, ring = over(trainer, ring_size)
    rows = texts(12, "prompt", "completion")
    args = config(**settings(folder, max_length=64))
    return finished(kind(language(folder), args, train_dataset=rows, processing_class=word_tokenizer(), **ring))


def dpo(folder, ring_size):
    trainer, config = trl("DPO")
    kind, ring = over(trainer, ring_size)
    rows, args = texts(12, "prompt", "chosen", "rejected"), config(**settings(folder, max_length=64))
    return finished(kind(language(folder), args=args, train_dataset=rows, processing_class=word_tokenizer(), **ring))


def kto(folder, ring_size):
    trainer, config = trl("KTO")
    kind, ring = over(trainer, ring_size)
    rows = texts(12, "prompt", "completion")
    rows = rows.add_column("label", [number % 2 == 0 for number in range(len(rows))])
    args = config(**settings(folder, max_length=64))
    return finished(kind(language(folder), args=args, train_dataset=rows, processing_class=word_tokenizer(), **ring))


def reward_model(pattern=None):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=1, pad_token_id=90, attn_implementation="ring_dilated")
    return LlamaForSequenceClassification(config).to(torch.get_default_dtype())


def reward(folder, ring_size):
    trainer, config = trl("Reward")
    kind, ring = over(trainer, ring_size)
    rows, args = texts(12, "chosen", "rejected"), config(**settings(folder, max_length=64))
    return finished(
        kind(
            saved(folder, LlamaForSequenceClassification, reward_model),
            args=args,
            train_dataset=rows,
            processing_class=word_tokenizer(),
            **ring,
        )
    )


def length_of(completions, **kwargs):
    """Rewards completions with an even number of words, and few different ones."""
    return [float(len(x.split()) % 2) - 0.1 * len({*x.split()}) for x in completions]


def grpo(folder, ring_size, name="GRPO", **changes):
    trainer, config = trl(name)
    kind, ring = over(trainer, ring_size)
    sizes = {"batch_size": 4, "num_generations": 2, "max_completion_length": 6, "steps": 4}
    args = config(**settings(folder, **{**sizes, **changes}))
    prompts = texts(12, "prompt", shortest=4, longest=9)
    return finished(
        kind(
            model=language(folder),
            reward_funcs=length_of,
            args=args,
            train_dataset=prompts,
            processing_class=word_tokenizer(),
            **ring,
        )
    )


def grpo_in_two_steps(folder, ring_size):
    return grpo(folder, ring_size, steps_per_generation=2, beta=0.1)


def rloo(folder, ring_size):
    return grpo(folder, ring_size, name="RLOO")


def distillation(folder, ring_size):
    trainer, config = trl("Distillation")
    kind, ring = over(trainer, ring_size)
    args = config(**settings(folder, batch_size=2, max_completion_length=6, steps=3))
    prompts = texts(12, "prompt", shortest=4, longest=9)
    return finished(
        kind(
            model=language(folder),
            teacher_model=language(folder, tiny_teacher),
            args=args,
            train_dataset=prompts,
            processing_class=word_tokenizer(),
            **ring,
        )
    )


def tiny_teacher(pattern):
    return tiny_llama(pattern, seed=5)


PROGRAMS = [language_model, label_smoothing, accumulated, with_metrics, own_loss, classifier, resumed, accelerate_loop]
OF_TRL = [sft, sft_packed, sft_completions, dpo, kto, reward, grpo, grpo_in_two_steps, rloo, distillation]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_transformers_trainer(program, tmp_path):
    compare(program, tmp_path)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("program", OF_TRL, ids=lambda program: program.__name__)
def test_trainers_of_trl(program, tmp_path):
    pytest.importorskip("trl")
    compare(program, tmp_path)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("program", [with_metrics, dpo, grpo], ids=lambda program: program.__name__)
def test_two_rings_of_two_are_two_processes(program, tmp_path):
    """Rewards are grouped over rings, and metrics count the rows of each ring once."""
    pytest.importorskip("trl")
    save(tmp_path, tiny_llama, tiny_teacher, classifier_model, reward_model)
    (expected, log), _ = run_ranks(run_program, 2, program, str(tmp_path / "two"), None)
    for found, own_log in run_ranks(run_program, 4, program, str(tmp_path / "rings"), 2):
        assert_alike(found, own_log, expected, log)


def compare(program, folder):
    save(folder, tiny_llama, tiny_teacher, classifier_model, reward_model)
    expected, log = run_program(0, program, str(folder / "one"), None)
    for found, own_log in run_ranks(run_program, 2, program, str(folder / "ring"), 2):
        assert_alike(found, own_log, expected, log)


def assert_alike(found, own_log, expected, log):
    """The weights, and all that was logged."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert distance(x, expected[name]) <= BOUND, (name, distance(x, expected[name]))
    assert len(own_log) == len(log)
    for entry, other in zip(own_log, log, strict=True):
        for name, value in other.items():
            assert entry[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


def test_settings_that_rings_change_are_refused(tmp_path):
    save(tmp_path, tiny_llama)
    for changes, message in (({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is not what it seems over a ring"),):
        with pytest.raises(AssertionError, match=message):
            run_ranks(run_program, 2, language_model_with(changes), str(tmp_path / "ring"), 2)


class language_model_with:  # a function with settings, that processes can be sent
    def __init__(self, changes):
        self.changes = changes

    def __call__(self, folder, ring_size):
        return language_model(folder, ring_size, **self.changes)
