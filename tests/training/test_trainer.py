"""What else a RingTrainer does: evaluation, resuming, users' losses and metrics, PEFT, TRL; and what it refuses."""

import contextlib
import logging
import math

import numpy as np
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForTokenClassification,
    Trainer,
    TrainingArguments,
)

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.tolerance import EXACT, allowed
from tests.support.training import (
    CHECKPOINTING,
    SIZES,
    assert_equal_runs,
    differences,
    documents,
    process_environment,
    tiny_llama,
    trainer,
)

pytestmark = pytest.mark.usefixtures("in_float64")

#: Four steps of two rows an epoch, or two of each of two rings: a checkpoint of the third step is in the middle of one.
ROWS = documents(7, 20, 61, seed=0, prompt=3)
EVAL_ROWS = documents(5, 20, 61, seed=3)
DATA = {"rows": ROWS, "collator": ra.PaddingCollator(), "batch_size": 2, "steps": 5}


# ---- evaluation


def accuracy(prediction: EvalPrediction):
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    scored = prediction.label_ids[:, 1:] != -100
    return {"right": int((right & scored).sum()), "scored": int(scored.sum()), "rows": len(prediction.label_ids)}


def most_likely(logits, labels):
    return logits.argmax(-1)


class WithMetrics(ra.RingTrainer):
    preprocess = staticmethod(most_likely)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, compute_metrics=accuracy, preprocess_logits_for_metrics=self.preprocess, **kwargs)


def of_the_next(logits, labels):
    """Wrong for shards: the last token of one looks at the first of another."""
    return torch.nn.functional.pad(logits[:, :-1].gather(2, labels[:, 1:, None].clamp(min=0))[..., 0], (0, 1))


class WithShiftedMetrics(WithMetrics):
    preprocess = staticmethod(of_the_next)


def evaluate(rank, folder, ring_size, layout="auto"):
    figures = {}
    for name, kind in (("loss alone", ra.RingTrainer), ("with metrics", WithMetrics)):
        settings = {"ring_size": ring_size, "layout": layout, "trainer_class": kind}
        _, made = trainer(rank, folder, eval_rows=EVAL_ROWS, **{**DATA, "steps": 2}, **settings)
        figures[name] = made.evaluate()
    # The same by perplexity, row by row.
    reports = [ra.perplexity(made.model, torch.tensor(row["input_ids"]), ring=made.ring) for row in EVAL_ROWS]
    figures["perplexity"] = sum(report.nll for report in reports) / sum(report.tokens for report in reports)
    return figures


@pytest.mark.parametrize(("world_size", "ring_size", "layout"), [(2, 2, "auto"), (2, 2, "documents"), (4, 2, "auto")])
def test_evaluation_sums_over_tokens(world_size, ring_size, layout, tmp_path):
    # With four processes a step has more rows, and the model is another one.
    alone = evaluate(0, tmp_path, 1)["with metrics"]["eval_right"] if world_size == 2 else None
    for figures in run_ranks(evaluate, world_size, tmp_path, ring_size, layout):
        for name in ("loss alone", "with metrics"):
            # five rows in batches of two: the last one is short, and a ring has none
            assert figures[name]["eval_loss"] == pytest.approx(figures["perplexity"], rel=EXACT)
            assert figures[name]["eval_tokens"] == sum(len(row["input_ids"]) - 1 for row in EVAL_ROWS)
            assert figures[name]["eval_samples_per_second"] > 0 and "eval_steps_per_second" not in figures[name]
            assert figures[name]["eval_perplexity"] == pytest.approx(np.exp(figures["perplexity"]), rel=EXACT)
        assert alone in (None, figures["with metrics"]["eval_right"])
        assert figures["with metrics"]["eval_rows"] == len(EVAL_ROWS)
        assert figures["with metrics"]["eval_scored"] == figures["with metrics"]["eval_tokens"]


# ---- going on


def interrupted(rank, folder, ring_size):
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, made = trainer(rank, folder / "whole", ring_size=ring_size, **DATA, **saving)
    tokens = made.state.num_input_tokens_seen
    again, made = trainer(
        rank,
        folder / "again",
        ring_size=ring_size,
        **DATA,
        **saving,
        model=tiny_llama(seed=7),  # all that counts comes from the checkpoint
        resume=str(folder / "whole" / "checkpoint-3"),
    )
    assert made.state.num_input_tokens_seen == tokens > 0
    return whole, again


@pytest.mark.parametrize(("world_size", "ring_size"), [(1, 1), (4, 2)])
def test_a_resumed_run_ends_as_the_uninterrupted_one(world_size, ring_size, tmp_path):
    ranks = (
        [interrupted(0, tmp_path, 1)] if world_size == 1 else run_ranks(interrupted, world_size, tmp_path, ring_size)
    )
    for whole, again in ranks:
        assert len(again["losses"]) == 5, "the history before the checkpoint is kept"
        assert_equal_runs(again, whole, "resumed")


# ---- users' own


class OwnLoss(ra.RingTrainer):
    """A loss over the next tokens, by the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels")
        outputs = model(**{name: x for name, x in inputs.items() if name != "shift_labels"})
        loss = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="sum"
        )
        loss = loss / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def with_own_loss(rank, folder, ring_size):
    return trainer(rank, folder, ring_size=ring_size, trainer_class=OwnLoss, **DATA)[0]


def adapted(rank, folder, ring_size):
    from peft import LoraConfig

    torch.manual_seed(3)
    model = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    return trainer(rank, folder, ring_size=ring_size, model=model, **DATA)[0]


def in_bfloat16(rank, folder, ring_size):
    return trainer(rank, folder, ring_size=ring_size, bf16=True, **DATA)[0]


def sft(rank, folder, ring_size, packing=False, chats=False):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    class RingSFTTrainer(ra.RingTrainerMixin, SFTTrainer):
        pass

    process_environment(rank, ring_size)
    args = SFTConfig(
        str(folder),
        max_length=64,
        packing=packing,
        assistant_only_loss=chats,
        per_device_train_batch_size=2,
        max_steps=4,  # an epoch, whose last batch is short
        use_cpu=True,
        bf16=False,
        **{CHECKPOINTING: False},
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",
        learning_rate=1e-2,
        seed=1,
    )
    model = tiny_llama()
    data = Dataset.from_list([chat_of(row) if chats else {"input_ids": row["input_ids"]} for row in ROWS])
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if chats else None
    torch.manual_seed(3)
    with contextlib.redirect_stdout(None):
        made = RingSFTTrainer(
            model,
            args,
            train_dataset=data,
            processing_class=byte_tokenizer(),
            peft_config=adapters,
            ring_size=ring_size,
        )
        made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "parameters": {name: x.detach().clone() for name, x in model.named_parameters()},
        "tokens": steps[-1]["num_tokens"],
    }


def chat_of(row):
    """A question of the first tokens of a row, and an answer of the others."""
    words = [f"w{token}" for token in row["input_ids"]]
    question, answer = " ".join(words[:9]), " ".join(words[9:])
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def byte_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} w1 {% endgeneration %}"
        "{% else %}{{ m.content }} w2 {% endif %}{% endfor %}"
    )
    return made


def sft_packed(rank, folder, ring_size):
    return sft(rank, folder, ring_size, packing=True)


def sft_chats_with_adapters(rank, folder, ring_size):
    return sft(rank, folder, ring_size, packing=True, chats=True)


KINDS = (with_own_loss, adapted, sft, sft_packed, sft_chats_with_adapters)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_kinds_of_training(kind, tmp_path):
    alone = kind(0, tmp_path / "alone", 1)
    for figures in run_ranks(kind, 2, tmp_path / "ring", 2):
        assert_equal_runs(figures, alone, kind.__name__)
        assert figures.get("tokens") == alone.get("tokens")


@pytest.mark.own_dtypes
def test_training_in_bfloat16(tmp_path):
    """As far from a run without bfloat16 as one process is."""
    exact = trainer(0, tmp_path, ring_size=1, **DATA)[0]
    bounds = {name: allowed(error) for name, error in differences(in_bfloat16(0, tmp_path, 1), exact).items()}
    for figures in run_ranks(in_bfloat16, 2, tmp_path, 2):
        assert_equal_runs(figures, exact, "bfloat16", bounds)


def own_loss_function(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("name", ["label_smoothing_factor", "compute_loss_func"])
def test_losses_by_the_logits_on_one_process_are_those_of_trainer(name, tmp_path):
    losses = []
    for kind, arguments in ((Trainer, TrainingArguments), (ra.RingTrainer, ra.RingTrainingArguments)):
        own = {"compute_loss_func": own_loss_function} if name == "compute_loss_func" else {}
        args = arguments(
            str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no", label_smoothing_factor=0.1 if name == "label_smoothing_factor" else 0,
        )  # fmt: skip
        made = kind(tiny_llama(), args, train_dataset=ROWS, data_collator=ra.PaddingCollator(), **own)
        made.train()
        losses.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=EXACT)


# ---- numbers that are not finite


class Diverging(ra.RingTrainer):
    """The loss of the last process is NaN from its third step on."""

    def compute_loss(self, model, inputs, **options):
        loss = super().compute_loss(model, inputs, **options)
        last = self.args.process_index == self.args.world_size - 1
        return loss * torch.nan if self.state.global_step >= 2 and last else loss


class Stopping(Diverging):
    def when_not_finite(self, loss, grad_norm):
        raise ArithmeticError(f"step {self.state.global_step + 1}: {loss} {grad_norm}")


def diverging(rank, folder, ring_size):
    """The error of each process, and whether all weights are finite then; and the warnings of a Trainer that goes on."""
    model, told = tiny_llama(), []
    try:
        trainer(rank, folder, ring_size=ring_size, trainer_class=Stopping, model=model, **DATA)
    except ArithmeticError as error:
        told.append(str(error))
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hf_ring_attention").addHandler(handler)
    made = trainer(rank, folder, ring_size=ring_size, trainer_class=Diverging, eval_rows=EVAL_ROWS, **DATA)[1]
    assert made.state.global_step == 5
    figures = made.evaluate()
    assert math.isnan(figures["eval_loss"]) and math.isnan(figures["eval_perplexity"])
    return finite, told


@pytest.mark.parametrize(("world_size", "ring_size"), [(1, 1), (2, 2), (2, 1)])
def test_a_loss_that_is_not_finite_is_told_on_all_processes_together(world_size, ring_size, tmp_path):
    for rank, (finite, told) in enumerate(run_ranks(diverging, world_size, tmp_path, ring_size)):
        assert finite and told[0] == "step 3: nan nan"
        warned = [text for text in told[1:] if "training goes on" in text]
        assert len(warned) == (rank == 0) and all("step 3: loss nan, gradient norm nan" in text for text in warned)


# ---- the best checkpoint


class MixedTrainer(ra.RingTrainerMixin, Trainer):
    """With the arguments of another Trainer, which know nothing of perplexities."""


@pytest.mark.parametrize("by", ["RingTrainer", "the mixin"])
def test_the_best_checkpoint_has_the_smallest_perplexity(by, tmp_path, caplog):
    kinds = (ra.RingTrainer, ra.RingTrainingArguments), (MixedTrainer, TrainingArguments)
    kind, arguments = kinds[by == "the mixin"]
    args = arguments(
        str(tmp_path), max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        metric_for_best_model="perplexity", load_best_model_at_end=True, optim="sgd", learning_rate=1e-2, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    made = kind(tiny_llama(), args, train_dataset=ROWS, eval_dataset=EVAL_ROWS, data_collator=ra.PaddingCollator())
    made.train()
    found = {x["step"]: x["eval_perplexity"] for x in made.state.log_history if "eval_perplexity" in x}
    assert len(set(found.values())) == 3
    assert made.state.best_metric == min(found.values())
    assert made.state.best_model_checkpoint.endswith(f"checkpoint-{min(found, key=found.get)}")
    assert made.evaluate()["eval_perplexity"] == pytest.approx(min(found.values()), rel=EXACT)
    assert ("'perplexity' came with greater_is_better=True" in caplog.text) == (by == "the mixin")


@pytest.mark.parametrize("metric", ["perplexity", "eval_perplexity", "eval_books_perplexity"])
def test_a_greater_perplexity_is_not_better(metric, tmp_path):
    args = ra.RingTrainingArguments(str(tmp_path), metric_for_best_model=metric, use_cpu=True)
    assert args.greater_is_better is False
    with pytest.raises(ValueError, match="keeps the worst checkpoint: leave greater_is_better out"):
        ra.RingTrainingArguments(str(tmp_path), metric_for_best_model=metric, greater_is_better=True, use_cpu=True)
    assert ra.RingTrainingArguments(str(tmp_path), metric_for_best_model="accuracy", use_cpu=True).greater_is_better


# ---- what is refused


def refused(rank, folder):
    errors = {}
    cases = {
        "label smoothing": {"label_smoothing_factor": 0.1},
        "token counts": {"average_tokens_across_devices": False},
        "ring size": {"ring_size": 3},
        "metrics of losses": {"include_for_metrics": ["loss"]},
        "noise": {"neftune_noise_alpha": 5},
        "counts of padding": {"include_num_input_tokens_seen": "all"},
        "masked": {"model": ModernBertForMaskedLM(ModernBertConfig(**SIZES, pad_token_id=0))},
        "classifier": {"model": Qwen3ForTokenClassification(Qwen3Config(**SIZES, head_dim=8))},
        "prompts": {
            "model": get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        },
        "dropout": {"model": GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=97))},
        "short rows": {"rows": documents(8, 1, 1, seed=0)},
        "few rows": {"rows": []},
    }
    for name, settings in cases.items():
        try:
            trainer(rank, folder, **{"ring_size": 2, **DATA, **settings})
        except ValueError as error:
            errors[name] = str(error)
    try:
        trainer(rank, folder, **{"ring_size": 2, **DATA, "collator": without_labels})
    except ValueError as error:
        errors["labels"] = str(error)
    try:
        _, made = trainer(rank, folder, ring_size=2, eval_rows=EVAL_ROWS, trainer_class=WithShiftedMetrics, **DATA)
        made.evaluate()
    except ValueError as error:
        errors["shifting"] = str(error)
    return errors


def without_labels(rows):
    return {name: x for name, x in ra.PaddingCollator()(rows).items() if name != "labels"}


REFUSED = {
    "label smoothing": "label_smoothing_factor would be computed from the shard of a row",
    "token counts": "average_tokens_across_devices=False would be computed from the shard of a row",
    "ring size": "2 processes cannot form rings of 3",
    "metrics of losses": "include_for_metrics=['loss'] would be computed from the shard of a row",
    "noise": "neftune_noise_alpha would be computed from the shard of a row",
    "counts of padding": "include_num_input_tokens_seen='all' would be computed from the shard of a row",
    "masked": "ModernBertForMaskedLM does not compute the loss of next tokens",
    "classifier": "Qwen3ForTokenClassification does not compute the loss of next tokens",
    "prompts": "virtual tokens",
    "dropout": "attn_pdrop=0.1",
    "short rows": "rows of 1 tokens cannot be sharded over a ring of 2",
    "few rows": "num_samples=0",
    "labels": "a batch has no labels",
    "shifting": "preprocess_logits_for_metrics sees shards of rows",
}


def test_what_would_be_wrong_is_refused_on_every_rank(tmp_path):
    for errors in run_ranks(refused, 2, tmp_path):
        for name, text in REFUSED.items():
            assert text in errors.get(name, "no error"), name
        assert len(errors) == len(REFUSED)
