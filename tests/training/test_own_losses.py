"""Trainers with losses of their own over a ring: distillation, auxiliary losses, several calls of the model; and what
they are told."""

import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForTokenClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.heads import LogitsNotFormedError
from tests.support.ranks import run_ranks, run_simulated
from tests.support.tiny_models import tiny_config, tiny_model
from tests.support.training import assert_equal_runs, documents, figures_of, process_environment, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")

#: All of them are a batch, in whatever order.
ROWS = documents(9, 20, 61, seed=0, prompt=3)


class Distilling(Trainer):
    """Learns from another model's logits besides the labels; `with_labels`: from those of the same call."""

    with_labels = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        unlabelled = {name: x for name, x in inputs.items() if name not in ("labels", "shift_labels")}
        logits = outputs.logits if self.with_labels else model(**unlabelled).logits
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"]).logits
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        apart = F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="none").sum(-1)
        apart = apart[labels != -100].sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss + apart, outputs) if return_outputs else loss + apart


class FromTheSameCall(Distilling):
    with_labels = True


class Twice(Trainer):
    """As R-Drop does it: the same rows twice."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first = super().compute_loss(model, dict(inputs), False, num_items_in_batch)
        return (first + super().compute_loss(model, dict(inputs), False, num_items_in_batch)) / 2


def over_a_ring(kind):
    return type(f"Ring{kind.__name__}", (ra.RingTrainerMixin, kind), {})


def arguments(folder, kind=TrainingArguments, **more):
    return kind(
        str(folder), per_device_train_batch_size=9, max_steps=3, logging_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", optim="sgd", learning_rate=1e-2, lr_scheduler_type="constant", seed=1, **more,
    )  # fmt: skip


def train(kind, folder, args=None, **more):
    """The teacher looks at each token alone, so that shards of rows are enough for it."""
    model = tiny_llama()
    made = kind(model, args or arguments(folder), train_dataset=ROWS, data_collator=ra.PaddingCollator(), **more)
    made.teacher = tiny_llama(pattern=ra.Pattern.exact(), seed=9, num_hidden_layers=0)
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    return figures_of(model, [x["loss"] for x in steps], [x["grad_norm"] for x in steps])


@pytest.mark.parametrize("kind", [Distilling, Twice])
def test_losses_of_their_own_are_those_of_a_plain_trainer(kind, tmp_path):
    right = train(kind, tmp_path)
    assert_equal_runs(train(over_a_ring(kind), tmp_path), right, kind.__name__)
    before = dict(tiny_llama().named_parameters())
    assert all(not torch.equal(x, before[name]) for name, x in right["parameters"].items())


def test_logits_of_a_call_with_labels_are_refused_until_they_are_asked_for(tmp_path):
    with pytest.raises(LogitsNotFormedError, match="loss_tokens_at_once=0"):
        train(over_a_ring(FromTheSameCall), tmp_path)
    made = train(over_a_ring(FromTheSameCall), tmp_path, loss_tokens_at_once=0)
    assert_equal_runs(made, train(FromTheSameCall, tmp_path), "by all logits")


def on_a_ring(rank, folder):
    process_environment(rank, 2)
    return [train(over_a_ring(kind), folder, ring_size=2) for kind in (Distilling, Twice)]


def test_losses_of_their_own_over_a_ring_are_those_of_one_process(tmp_path):
    right = [train(kind, tmp_path) for kind in (Distilling, Twice)]
    for figures in run_ranks(on_a_ring, 2, tmp_path):
        for made, expected in zip(figures, right, strict=True):
            assert_equal_runs(made, expected, "over a ring")


# ---- what they are told


def own_function(logits, labels, vocab_size, **kwargs):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.5)


def test_a_loss_function_of_the_model_is_refused_at_set_up(tmp_path):
    model = tiny_llama()
    model.loss_function = own_function
    for at_once in (0, 1024):
        args = arguments(tmp_path, ra.RingTrainingArguments, loss_tokens_at_once=at_once)
        with pytest.raises(ValueError, match=r"the loss_function of LlamaForCausalLM is own_function.*compute_loss"):
            ra.RingTrainer(model, args, train_dataset=ROWS, data_collator=ra.PaddingCollator())


@pytest.mark.parametrize("at_once", [-1, None, 7.5])
def test_slices_of_no_number_of_tokens_are_refused_at_set_up(at_once, tmp_path):
    with pytest.raises(ValueError, match=f"loss_tokens_at_once must be a number of tokens.*got {at_once}"):
        over_a_ring(Trainer)(
            tiny_llama(), arguments(tmp_path), data_collator=ra.PaddingCollator(), loss_tokens_at_once=at_once
        )


class Predicting(Distilling):
    def prediction_step(self, *args, **kwargs):
        raise AssertionError("it was called")


def test_methods_that_are_not_called_are_named(tmp_path, caplog):
    for kind, named in ((Trainer, False), (Predicting, True)):
        caplog.clear()
        over_a_ring(kind)(tiny_llama(), arguments(tmp_path), train_dataset=ROWS, data_collator=ra.PaddingCollator())
        assert ("Predicting.prediction_step is not called" in caplog.text) == named
        assert "gets shards" not in caplog.text, "there are none on one process"


def told_of_shards(rank, folder):
    process_environment(rank, 2)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hf_ring_attention.training.trainer_checks").addHandler(handler)
    for kind in (Distilling, Trainer):
        over_a_ring(kind)(
            tiny_llama(), arguments(folder), train_dataset=ROWS, data_collator=ra.PaddingCollator(), ring_size=2
        )
    errors = []
    settings = ({}, {"ring_size": None}, {"args": arguments(folder, ra.RingTrainingArguments)})
    for own in (*settings, {"ring_size": 2 if rank else None}):
        try:
            over_a_ring(Trainer)(tiny_llama(), **{"args": arguments(folder), "train_dataset": ROWS, **own})
        except ValueError as error:
            errors.append(str(error))
    return records, errors


def test_several_processes_say_their_rings_and_learn_what_shards_are(tmp_path):
    for rank, (records, errors) in enumerate(run_ranks(told_of_shards, 2, tmp_path)):
        shards = [text for text in records if "Distilling.compute_loss gets shards of rows" in text]
        assert len(shards) == len(records) == (rank == 0)
        assert len(errors) == 4
        for error in errors:
            assert "the size of rings was not given" in error and "there are 2 processes" in error
            assert "ring_size=2 makes one ring of all" in error and "ring_size=1 makes each process a ring" in error


def test_one_process_is_a_ring_of_one(tmp_path):
    args = arguments(tmp_path, ra.RingTrainingArguments)
    assert args.ring_size is None
    made = ra.RingTrainer(tiny_llama(), args, train_dataset=ROWS, data_collator=ra.PaddingCollator())
    assert made.ring.world_size == 1


def test_trainers_of_sequences_train_but_do_not_generate(tmp_path):
    kind = over_a_ring(Seq2SeqTrainer)
    made = train(kind, tmp_path, arguments(tmp_path, Seq2SeqTrainingArguments))
    assert_equal_runs(made, train(Trainer, tmp_path), "Seq2SeqTrainer")
    with pytest.raises(ValueError, match="predict_with_generate: RingSeq2SeqTrainer evaluates losses and logits"):
        kind(
            tiny_llama(), arguments(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True), train_dataset=ROWS
        )


def test_batches_of_other_loaders_are_named_in_evaluation(tmp_path):
    made = over_a_ring(Trainer)(tiny_llama(), arguments(tmp_path), data_collator=ra.PaddingCollator())
    batch = ra.PaddingCollator()(ROWS[:2])
    with pytest.raises(ValueError, match=r"evaluation: a batch has no shift_labels.*prepare_data_loader"):
        made.prediction_step(made.model, batch, True)


def a_classifier():
    torch.manual_seed(0)
    return AutoModelForTokenClassification.from_config(tiny_config("qwen3"))


@pytest.mark.parametrize("made", [lambda: tiny_model("whisper", "eager"), a_classifier], ids=["whisper", "classifier"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_that_do_not_look_at_shift_labels_are_refused(made, world_size):
    models = [made() for _ in range(world_size)]
    batch = ra.PaddingCollator()(ROWS[:2])
    batch["input_ids"] = batch["input_ids"] % 30

    def refused(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        shard = ra.shard_batch(batch, ring)
        model(**{name: x for name, x in shard.items() if "labels" not in name}, use_cache=False)
        with pytest.raises(
            ValueError, match=r"was given shift_labels, and computes a loss of its own.*ra.count_tokens"
        ):
            model(**shard, use_cache=False, num_items_in_batch=7)

    run_simulated(refused, world_size)
