"""Answers are those of plain passes over whole rows: likelihoods, greedy texts, alone, in batches and on rings."""

import errno
import os

import pytest
import torch
from accelerate import Accelerator

import hf_ring_attention as ra
from hf_ring_attention.evaluation.answers import answer_questions
from hf_ring_attention.evaluation.evaluator import Evaluator
from hf_ring_attention.evaluation.jobs import EvaluationPlan, key_of
from hf_ring_attention.evaluation.journal import Journal, journal_of
from hf_ring_attention.hf.cache import cache_argument
from tests.support.evaluation import inputs_of, load, save_checkpoint
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, float64
from tests.support.training import process_environment

pytestmark = pytest.mark.usefixtures("in_float64")

PATTERNS = ("exact", "window:48+4", "pyramid:32,3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder)
    return folder


def plan_of(**changes):
    return EvaluationPlan(**{"patterns": PATTERNS, "tasks": ("passkey",), "lengths": (400,), "samples": 3, **changes})


def loss_behind(model, prompt, answer):
    """The sum of the losses of an answer's tokens in one pass over the whole row."""
    row = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(row).logits[0, len(prompt) - 1 : -1].float()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))


def greedy(model, tokenizer, prompt, count):
    """The likeliest tokens, one by one, each from a pass over the whole row, up to the end token."""
    row = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize("pattern", PATTERNS[::2])
def test_answers_are_those_of_whole_rows(folder, pattern, rng):
    model, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, plan_of(tasks=("needle",), seed=rng.randrange(10**6)))
    ra.patch_model(model, pattern)
    model.generation_config.update(do_sample=True, repetition_penalty=3.0)  # It does not count.
    questions = [inputs.question("needle", 400, depth, number) for number, depth in enumerate((0.0, 0.7))]
    batch = answer_questions(model, tokenizer, questions)
    for question, together in zip(questions, batch):
        (alone,) = answer_questions(model, tokenizer, [question])
        assert alone.text == together.text == greedy(model, tokenizer, question.prompt, 24)
        expected = [loss_behind(model, question.prompt, ids) for ids in question.candidate_ids]
        for answer in (alone, together):
            assert answer.losses == pytest.approx(expected, rel=EXACT)
    assert len({answer.losses for answer in batch}) == 2


def test_a_token_for_padding_need_not_have_an_embedding(folder):
    """One that was added to the tokenizer alone."""
    model, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, plan_of(tasks=("needle",)))
    questions = [inputs.question("needle", 400, 0.5, number) for number in range(3)]
    assert len({len(question.prompt) for question in questions}) > 1
    expected = answer_questions(model, tokenizer, questions)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings
    for answer, one in zip(answer_questions(model, tokenizer, questions), expected):
        assert (answer.text, answer.losses) == (one.text, one.losses)


def test_likelihoods_where_the_last_tokens_see_every_key(folder, rng):
    """As tokens that come one by one behind the prompt, each of which is the last of its row."""
    model, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, plan_of(tasks=("needle",), seed=rng.randrange(10**6)))
    questions = [inputs.question("needle", 400, 0.5, number) for number in range(2)]
    plain = answer_questions(ra.patch_model(model, "window:16+2"), tokenizer, questions)
    for last in (1, 3):
        ra.patch_model(model, f"branches:sink=2,window=16,last={last}")
        for question, answer, other in zip(questions, answer_questions(model, tokenizer, questions), plain):
            prompt = torch.tensor([question.prompt])
            for candidate, loss in zip(question.candidate_ids, answer.losses):
                cache, expected = ra.prefill(model, prompt[:, :-1]), 0.0
                for token, before in zip(candidate, [question.prompt[-1], *candidate]):
                    with torch.no_grad():
                        logits = model(torch.tensor([[before]]), **cache_argument(cache), use_cache=True).logits[0, -1]
                    expected -= float(logits.float().log_softmax(-1)[token])
                assert loss == pytest.approx(expected, rel=EXACT)
            assert answer.losses != other.losses


def test_models_that_generate_from_another_position_are_refused(folder):
    _, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, plan_of())
    model = tiny_model("roberta", "ring_dilated")
    message = "RobertaForCausalLM has position [1-9] for the first token of a row, .* ask for perplexity alone"
    with pytest.raises(ValueError, match=message):
        answer_questions(model, tokenizer, [inputs.question("passkey", 400, 0.5, 0)])
    with pytest.raises(ValueError, match=message):
        Evaluator(model, inputs).run(None)


def test_only_what_is_asked_for_is_computed(folder):
    model, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, plan_of())
    question = [inputs.question("passkey", 400, 0.5, 0)]
    (generated,), (likely,) = (
        answer_questions(model, tokenizer, question, [way]) for way in ("generated", "likelihood")
    )
    assert generated.losses is None and generated.text is not None
    assert likely.text is None and len(likely.losses) == 8


# ---- the whole evaluation, on one process and on several


TASKS = ("perplexity", "longppl", "passkey")


def evaluation_plan():
    return plan_of(
        patterns=PATTERNS[1:],
        tasks=TASKS,
        lengths=(421,),
        depths=(0.3,),
        samples=2,
        short_context=150,
        sharing=90,
        least_gain=0.01,
        least_likelihood=-20.0,
        batch=2,
    )


def evaluate(folder, output, ring=None, **changes):
    """The records of an evaluation, by their keys; None on other processes than the first."""
    model, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, evaluation_plan())
    evaluator = Evaluator(model, inputs, ring)
    if ring is not None and (ring.rank or ring.dp_rank):
        return evaluator.run(None)
    with journal_of(output, {"plan": inputs.plan.to_dict()}, {}) as journal:
        evaluator.run(journal)
        assert len(journal.records) == len({key_of(record) for record in journal.records})
        return {key_of(record): record for record in journal.records}


def evaluate_on_rank(rank, folder, output, transport):
    return evaluate(folder, output, ra.Ring(transport=transport))


def figures_of(record):
    """The sums that may be rounded otherwise, and all that must be equal."""
    sums = [record.get("nll", 0.0), *record.get("candidate_nll", ()), *(x[1] for x in record.get("by_position", ()))]
    same = {
        name: x for name, x in record.items() if "nll" not in name and "seconds" not in name and name != "by_position"
    }
    return sums, same


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    with float64():
        return evaluate(folder, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("processes", "transport"), [(2, "ring"), (2, "heads"), (4, "auto")])
def test_processes_find_what_one_finds(ranks, folder, alone, tmp_path, processes, transport):
    found, *others = ranks.run(evaluate_on_rank, processes, folder, tmp_path / "report", transport)
    assert others == [None] * (processes - 1)
    assert list(found) == list(alone)
    for key, record in found.items():
        (sums, same), (expected, others) = figures_of(record), figures_of(alone[key])
        assert same == others
        assert sums == pytest.approx(expected, rel=1e-6)


def test_patterns_give_figures_of_their_own(alone):
    by_pattern = {pattern: [r.get("nll") for key, r in alone.items() if key[1] == pattern] for pattern in PATTERNS[1:]}
    assert len({tuple(figures) for figures in by_pattern.values()}) == 2
    gaining = [record["tokens"] for key, record in alone.items() if key[0] == "longppl"]
    assert sum(gaining), "no token gains from a long context, so nothing was compared"


def evaluate_on_own_ring(rank, folder, output):
    process_environment(rank, 2)
    return evaluate(folder, output, ra.Ring.from_accelerator(Accelerator(cpu=True), 1))


def evaluate_on_a_full_disk(rank, folder, output):
    """What the process raises when process 0 cannot write down what all have computed."""

    def full(journal, records):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Journal.append = full
    with pytest.raises(OSError if rank == 0 else ValueError) as caught:
        evaluate_on_rank(rank, folder, output, "ring")
    return str(caught.value)


def test_a_disk_that_is_full_ends_all_processes_with_that_error(folder, tmp_path):
    own, other = run_ranks(evaluate_on_a_full_disk, 2, folder, tmp_path / "report")
    assert "No space left on device" in own and "process 0 of 2" in other and "No space left on device" in other


def test_rings_that_are_dealt_jobs_find_what_one_finds(folder, alone, tmp_path):
    """Two rings of one process each take every other job."""
    found, other = run_ranks(evaluate_on_own_ring, 2, folder, tmp_path / "report")
    assert other is None and set(found) == set(alone)
    for key, record in found.items():
        (sums, same), (expected, others) = figures_of(record), figures_of(alone[key])
        assert same == others and sums == pytest.approx(expected, rel=1e-6)


def test_what_is_there_is_not_computed_again(folder, alone, tmp_path):
    """Of a journal that lacks some records, one of them in the middle of a job, only these are added."""
    records, lacking = list(alone.values()), [0, 5, len(alone) - 1]
    model, tokenizer = load(folder)
    inputs = inputs_of(tokenizer, evaluation_plan())
    with journal_of(tmp_path, {}, {}) as journal:
        journal.append([record for number, record in enumerate(records) if number not in lacking])
        Evaluator(model, inputs).run(journal)
        added = journal.records[len(records) - len(lacking) :]
    assert {key_of(record) for record in added} == {key_of(records[number]) for number in lacking}
    for record in added:
        assert figures_of(record)[1] == figures_of(alone[key_of(record)])[1]
        assert figures_of(record)[0] == pytest.approx(figures_of(alone[key_of(record)])[0], rel=EXACT)


def test_a_model_computes_the_pattern_that_is_named_and_nothing_beside_it(folder):
    """Patterns of single layers, which the checkpoint came with, count for "own" alone."""
    model, tokenizer = load(folder)
    ids = torch.randint(0, 256, (1, 300))
    exact, window = (float(ra.perplexity(ra.patch_model(model, x), ids).nll) for x in ("exact", "window:48+4"))
    ra.patch_model(model, "exact")
    ra.patch_config(model.config, "window:8+1", layers=[0])
    own = float(ra.perplexity(model, ids).nll)
    evaluator = Evaluator(model, inputs_of(tokenizer, plan_of()))
    found = {}
    for pattern in ("own", "exact", "window:48+4", "own", "exact"):
        evaluator.use(pattern)
        found.setdefault(pattern, []).append(float(ra.perplexity(model, ids).nll))
    assert found == {"own": [own, own], "exact": [exact, exact], "window:48+4": [window]}
    assert len({own, exact, window}) == 3
