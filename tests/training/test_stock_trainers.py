"""Stock programs of Transformers and TRL over a ring of 2 end with the weights of one process; rows of SFT stay whole."""

import importlib
import logging

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from tests.support.stock import (
    PATTERN,
    assert_alike,
    over,
    run_program,
    save,
    saved,
    settings,
    texts,
    weights,
    word_tokenizer,
)
from tests.support.training import SIZES, tiny_llama

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]


def language(folder, make=tiny_llama):
    return saved(folder, LlamaForCausalLM, make)


def tokens(count=8):
    tokenizer = word_tokenizer()
    rows = texts(count, "text")
    return rows.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])


def finished(trainer):
    """The weights after training, and its log."""
    trainer.train()
    logs = [
        {name: x for name, x in entry.items() if isinstance(x, float) and "time" not in name and "_per_" not in name}
        for entry in trainer.state.log_history
    ]
    return weights(trainer.model), logs


def by_trainer(trainer, folder, ring_size, model=None, **more):
    """A Trainer, or a class made of it, that fine-tunes a language model unless it is given more."""
    kind, ring = over(trainer, ring_size)
    data = {"train_dataset": tokens(), "data_collator": DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)}
    args = more.pop("args", None) or TrainingArguments(**settings(folder))
    return kind(model or language(folder), args, **{**data, **more}, **ring)


def accuracy(prediction):
    best, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((best == labels)[labels != -100].mean()), "rows": float(len(best))}


def with_metrics(folder, ring_size):
    """Evaluates in an uneven number of batches, and ends with the best checkpoint."""
    changes = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "steps": 4}
    changes |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "accuracy"}
    args = TrainingArguments(**settings(folder, greater_is_better=True, **changes))
    more = {"eval_dataset": tokens(5), "compute_metrics": accuracy}
    return finished(by_trainer(Trainer, folder, ring_size, args=args, **more))


def classifier_model(pattern=None, labels=3):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=labels, pad_token_id=90, attn_implementation="ring_dilated")
    return LlamaForSequenceClassification(config).to(torch.get_default_dtype())


def classifier(folder, ring_size):
    rows = tokens().map(lambda row: {"labels": len(row["input_ids"]) % 3})

    def right(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    more = {"train_dataset": rows, "data_collator": None, "compute_metrics": right}
    model = saved(folder, LlamaForSequenceClassification, classifier_model)
    trainer = by_trainer(Trainer, folder, ring_size, model, processing_class=word_tokenizer(), **more)
    trained = finished(trainer)
    predictions = trainer.predict(rows).predictions
    return trained[0] | {"predictions": torch.from_numpy(np.asarray(predictions))}, trained[1]


def accelerate_loop(folder, ring_size):
    """A loop with accumulation and a schedule, which resumes from its checkpoint in the middle of an epoch."""

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


def by_trl(name, folder, ring_size, rows, model=None, changes=None, **more):
    """Trains on these rows with a Trainer of TRL."""
    kind, ring = over(
        greedy(name) if "num_generations" in (changes or {}) else getattr(trl, f"{name}Trainer"), ring_size
    )
    args = getattr(trl, f"{name}Config")(**settings(folder, **(changes or {"max_length": 64})))
    given = {"train_dataset": rows, "processing_class": word_tokenizer(), **more, **ring}
    return finished(kind(model=model or language(folder), args=args, **given))


def sft_packed(folder, ring_size):
    return by_trl("SFT", folder, ring_size, texts(12, "text"), changes={"max_length": 32, "packing": True})


def dpo(folder, ring_size):
    return by_trl("DPO", folder, ring_size, texts(12, "prompt", "chosen", "rejected"))


def kto(folder, ring_size):
    rows = texts(12, "prompt", "completion")
    return by_trl("KTO", folder, ring_size, rows.add_column("label", [number % 2 == 0 for number in range(len(rows))]))


def reward_model(pattern=None):
    return classifier_model(labels=1)


def reward(folder, ring_size):
    model = saved(folder, LlamaForSequenceClassification, reward_model)
    return by_trl("Reward", folder, ring_size, texts(12, "chosen", "rejected"), model)


def length_of(completions, **kwargs):
    """Rewards completions with an even number of words, and few different ones."""
    return [float(len(x.split()) % 2) - 0.1 * len({*x.split()}) for x in completions]


def greedy(name):
    """A Trainer whose copies of a prompt end with different words, so that completions differ without random numbers."""

    class Greedy(getattr(trl, f"{name}Trainer")):
        def _tokenize_prompts(self, prompts):
            ids, *rest = super()._tokenize_prompts(prompts)
            return [[*x, 5 + number % self.args.num_generations] for number, x in enumerate(ids)], *rest

    return Greedy


def grpo(folder, ring_size, name="GRPO", **changes):
    changes = {"batch_size": 4, "num_generations": 2, "max_completion_length": 6, "steps": 4, **changes}
    changes["generation_kwargs"] = {"do_sample": False}
    prompts = texts(12, "prompt", shortest=4, longest=9)
    return by_trl(name, folder, ring_size, prompts, changes=changes, reward_funcs=length_of)


def grpo_in_two_steps(folder, ring_size):
    return grpo(folder, ring_size, steps_per_generation=2, beta=0.1)


def rloo(folder, ring_size):
    return grpo(folder, ring_size, name="RLOO")


def sdpo(folder, ring_size, model=None):
    """Its helper gathers prompts, and so does a callback that logs completions."""
    module = importlib.import_module("trl.experimental.sdpo")
    kind, ring = over(module.SDPOTrainer, ring_size)
    changes = {"batch_size": 4, "num_generations": 2, "max_completion_length": 6, "steps": 2}
    changes |= {"success_reward_threshold": 0.4}
    rows = texts(12, "prompt", "privileged_context", shortest=4, longest=9)
    given = {"train_dataset": rows, "eval_dataset": rows.select(range(3)), "processing_class": word_tokenizer()}
    args = module.SDPOConfig(**settings(folder, **changes))
    trainer = kind(model or language(folder), length_of, args, **given, **ring)
    callback = trl.LogCompletionsCallback(trainer, GenerationConfig(max_new_tokens=3, do_sample=False), freq=2)
    trainer.add_callback(callback)
    found, log = finished(trainer)
    return found, [*log, {"rows": int(trainer.accelerator.reduce(torch.tensor(len(callback.table))))}]


def distillation(folder, ring_size):
    prompts, changes = texts(12, "prompt", shortest=4, longest=9), {"max_completion_length": 6, "steps": 3}
    changes["generation_kwargs"] = {"do_sample": False}
    teacher = language(folder, tiny_teacher)
    return by_trl("Distillation", folder, ring_size, prompts, changes=changes, teacher_model=teacher)


def tiny_teacher(pattern):
    return tiny_llama(pattern, seed=5)


PROGRAMS = [with_metrics, classifier, accelerate_loop]
OF_TRL = [sft_packed, dpo, kto, reward, grpo_in_two_steps, rloo, distillation]


@pytest.mark.drawn
@pytest.mark.parametrize("program", [*PROGRAMS, *OF_TRL], ids=lambda program: program.__name__)
def test_a_ring_of_two_is_one_process(program, tmp_path, programs):
    save(tmp_path, tiny_llama, tiny_teacher, classifier_model, reward_model)
    expected, log = run_program(0, program, str(tmp_path / "one"), None)
    for found, own_log in programs.run(run_program, 2, program, str(tmp_path / "ring"), 2):
        assert_alike(found, own_log, expected, log)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("program", [with_metrics, grpo, sdpo], ids=lambda program: program.__name__)
def test_two_rings_of_two_are_two_processes(program, tmp_path, programs):
    """Rewards are grouped over rings, and metrics count the rows of each ring once."""
    save(tmp_path, tiny_llama, tiny_teacher, classifier_model, reward_model)
    (expected, log), _ = programs.run(run_program, 2, program, str(tmp_path / "two"), None)
    for found, own_log in programs.run(run_program, 4, program, str(tmp_path / "rings"), 2):
        assert_alike(found, own_log, expected, log)


def scored_before(folder, ring_size, pattern, precompute):
    """A reference without a pattern; its scores are computed at set-up, or in each step."""
    model = ra.patch_model(tiny_llama(None), pattern)
    changes = {"max_length": 64, "precompute_ref_log_probs": precompute, "steps": 2}
    rows = Dataset.load_from_disk(f"{folder}/rows")  # where all processes find the scores
    return by_trl("DPO", folder, ring_size, rows, model, changes, ref_model=tiny_llama(None, seed=1))[0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_reference_is_scored_under_the_pattern_of_the_model(ring_size, tmp_path, programs):
    """Also if scores of another pattern are there, of the same weights and rows."""
    texts(6, "prompt", "chosen", "rejected").save_to_disk(tmp_path / "rows")
    for pattern in ("window:12+2", "exact"):
        expected = run_program(0, scored_before, tmp_path, 1, pattern, False)
        for found in programs.run(run_program, ring_size, scored_before, tmp_path, ring_size, pattern, True):
            assert_alike(found, [], expected, [])


def test_a_teacher_that_is_a_copy_has_the_pattern_of_the_student(tmp_path):
    """Also if the folder that TRL loads it from has none."""
    save(tmp_path, tiny_llama)
    expected = run_program(0, sdpo, tmp_path / "with", 1)
    tiny_llama(None).save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.get_default_dtype())
    assert_alike(*run_program(0, sdpo, tmp_path / "without", 1, ra.patch_model(model, PATTERN)), *expected)


def groups(folder, ring_size):
    """What TRL's arguments take by the number of processes, and two rings of one row each cannot divide or change."""
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hf_ring_attention").addHandler(handler)
    kind, ring = over(trl.GRPOTrainer, ring_size)
    given = {"train_dataset": texts(4, "prompt"), "processing_class": word_tokenizer(), "reward_funcs": length_of}
    given |= {"eval_dataset": texts(4, "prompt")}

    def made(**changes):
        args = trl.GRPOConfig(**settings(folder, **{"batch_size": 2, "num_generations": 2, **changes}))
        return kind(tiny_llama(), args=args, **given, **ring)

    for count, wrong in ((2, {}), (4, {"batch_size": 4, "num_generations_eval": 4})):
        with pytest.raises(ValueError, match=f"num_generations={count} of evaluations .* times 1 rings"):
            made(eval_strategy="steps", per_device_eval_batch_size=count // 2, **wrong)
    assert made(per_device_eval_batch_size=1).args.generation_batch_size == 2 and not told
    assert made(generation_batch_size=8).args.generation_batch_size == 4
    logging.getLogger("hf_ring_attention").removeHandler(handler)
    return told


def test_groups_of_completions_that_rings_cannot_divide(tmp_path, programs):
    for rank, told in enumerate(programs.run(run_program, 2, groups, tmp_path, 2)):
        assert told == ["generation_batch_size is 4, not 8 (by processes): set steps_per_generation"][rank:]


def test_a_generation_batch_that_counts_prompts_of_one_process_is_taken(tmp_path):
    module = importlib.import_module("trl.experimental.iw_opd")
    save(tmp_path, tiny_llama)
    kind, ring = over(module.IWOPDTrainer, 1)
    args = module.IWOPDConfig(**settings(tmp_path, num_generations=2, lmbda=1.0))
    given = {"train_dataset": texts(4, "prompt", "completion"), "processing_class": word_tokenizer(), **ring}
    student, teacher = (language(tmp_path / "run") for _ in range(2))
    assert kind(student, teacher_model=teacher, args=args, **given).args.generation_batch_size == 1


#: Documents of at most this many tokens stay whole.
LONGEST = 16


def of_sft(folder, ring_size, rows, more=None, **changes):
    """TRL's Trainer, whose rows are prepared when it is made."""
    kind, ring = over(trl.SFTTrainer, ring_size)
    args = trl.SFTConfig(**settings(str(folder), **changes))
    more = {"processing_class": word_tokenizer(), **(more or {})}
    return kind(tiny_llama(), args, train_dataset=rows, **more, **ring)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"max_length": LONGEST},
        {"max_length": LONGEST, "packing": True},
        {"max_length": LONGEST, "packing": True, "packing_strategy": "bfd_split"},
        {"max_length": None},
    ],
    ids=str,
)
def test_tokens_that_are_cut_off_are_told(how, streaming, tmp_path, caplog):
    rows = texts(9, "text")
    whole = [len(word_tokenizer()(f"{text}<eos>").input_ids) for text in rows["text"]]
    rows = rows.to_iterable_dataset() if streaming else rows
    warn_once.cache_clear()
    made, stock = ([*of_sft(tmp_path, size, rows, **how).train_dataset] for size in (1, None))
    assert made == stock
    told = [record.getMessage() for record in caplog.records if "will be cut off" in record.getMessage()]
    cut = sum(whole) - sum(len(row["input_ids"]) for row in stock)
    assert (cut > 0) == (how["max_length"] is not None and "packing_strategy" not in how)
    if not cut:
        assert not told
    elif streaming:  # Nobody knows how many documents follow its first long one.
        first = next(length for length in whole if length > LONGEST)
        assert told[0].startswith(f"{first - LONGEST} of {first} tokens will be cut off")
    else:
        assert [text.partition(", since")[0] for text in told] == [f"{cut} of {sum(whole)} tokens will be cut off"]


def test_packed_rows_that_would_lose_their_documents_are_refused(tmp_path):
    ids = texts(9, "text").map(lambda row: word_tokenizer()(row["text"]), remove_columns=["text"])
    rows = ra.pack_documents(ids, 32)
    kept = {"data_collator": default_data_collator}
    for more in ({}, kept, {"data_collator": DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)}):
        with pytest.raises(ValueError, match=r"packed, and this Trainer drops their position_ids: pass data_collator"):
            of_sft(tmp_path, 1, rows, more)
    trainer = of_sft(tmp_path, 1, rows, kept, remove_unused_columns=False)
    kind, ring = over(Trainer, 1)
    plain = kind(tiny_llama(), TrainingArguments(**settings(str(tmp_path))), train_dataset=rows, **kept, **ring)
    batches = [next(iter(x.get_train_dataloader())) for x in (trainer, plain)]
    assert all(batch.keys() == {"input_ids", "labels", "position_ids", "attention_mask"} for batch in batches)
