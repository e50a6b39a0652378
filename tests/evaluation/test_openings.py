"""Texts open with the tokens that the model's tokenizer puts there: each piece, window and context, none of them scored."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import hf_ring_attention as ra
from hf_ring_attention.evaluation.evaluator import Evaluator
from hf_ring_attention.evaluation.jobs import EvaluationPlan, Job
from hf_ring_attention.evaluation.long_perplexity import short_context_nll
from hf_ring_attention.evaluation.results import remarks_on
from hf_ring_attention.evaluation.strides import stride_nll
from hf_ring_attention.evaluation.texts import EvaluationText, opening_tokens, text_pieces
from tests.support.evaluation import inputs_of, load, made_up_text, save_checkpoint
from tests.support.tolerance import EXACT
from tests.support.training import tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder)
    return folder


def opened(tokenizer, count):
    """The tokenizer, which puts its end token so often before each text, and once behind it."""
    end = tokenizer.eos_token
    template = TemplateProcessing(
        single=" ".join([*[end] * count, "$A", end]), special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


@pytest.mark.parametrize("count", [0, 1, 2])
def test_pieces_open_and_cover_their_text(folder, rng, count):
    _, tokenizer = load(folder)
    if count:
        opened(tokenizer, count)
    end = tokenizer.eos_token_id
    assert opening_tokens(tokenizer).tolist() == [end] * count
    text = EvaluationText("book", made_up_text(rng.randrange(100), 200))
    length = rng.randint(20, 60)
    pieces = text_pieces(text, tokenizer, length, 5)
    assert len(pieces) == 5 and {len(piece.ids) for piece in pieces} == {length}
    assert all(piece.opening == count and piece.ids[:count].tolist() == [end] * count for piece in pieces)
    of_text = torch.cat([piece.ids[count:] for piece in pieces])
    plain = tokenizer(text.content, add_special_tokens=False).input_ids
    assert of_text.tolist() == plain[: len(of_text)]
    # Each token is a byte; nothing predicts the first one of a piece that no other opens.
    scored = torch.arange(length) >= max(1, count)
    assert {piece.size_of(scored) for piece in pieces} == {length - count - (not count)}


def test_a_length_without_room_is_refused(folder):
    _, tokenizer = load(folder)
    with pytest.raises(ValueError, match="3 tokens open each text of this model: ask for a length greater than 3"):
        text_pieces(EvaluationText("book", "some words"), opened(tokenizer, 3), 3, 1)


def losses_behind(model, opening, ids):
    """The loss of each token of a row behind those that open it, the first of all left out."""
    row = torch.cat([opening, ids])
    with torch.no_grad():
        logits = model(row[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")[-len(ids) :]


def test_windows_of_a_stride_open(rng):
    """Each token of the text is scored once, in the first window that it is in."""
    model = tiny_llama()
    for _ in range(6):
        length, window, count = rng.randint(2, 90), rng.randint(5, 40), rng.randint(1, 2)
        stride = rng.randint(1, window)
        opening, ids = torch.randint(1, 97, (count,)), torch.randint(1, 97, (length,))
        nll = stride_nll(model, torch.cat([opening, ids]), window, stride, opening=count)
        assert nll.isnan().tolist() == [True] * count + [False] * length
        room, step = window - count, min(stride, window - count)
        for token in range(length):
            first = 0 if token < room else -(-(token + 1 - room) // step) * step
            expected = losses_behind(model, opening, ids[first : token + 1])[-1]
            assert float(nll[count + token]) == pytest.approx(float(expected), rel=EXACT), (
                length,
                window,
                stride,
                token,
            )
    with pytest.raises(ValueError, match="a window of 2 tokens has no room behind the 2 that open it"):
        stride_nll(model, torch.arange(9), 2, 1, opening=2)


def test_short_contexts_open(rng):
    model, count = tiny_llama(pattern=None), rng.randint(1, 2)
    short, sharing = rng.randint(4, 12), rng.randint(2, 9)
    ids = torch.randint(1, 97, (60,))
    nll = short_context_nll(model, ids, short, sharing, opening=count)
    assert int(nll.isnan().sum()) == short
    for token in range(short, 60):
        first = (token - short) // sharing * sharing
        expected = losses_behind(model, ids[:count], ids[first + count : token + 1])[-1]
        assert float(nll[token]) == pytest.approx(float(expected), rel=EXACT)


@pytest.mark.parametrize("stride", [None, 300])
def test_an_evaluation_reads_what_the_tokenizer_makes_of_a_text(folder, stride):
    model, tokenizer = load(folder)
    opened(tokenizer, 1)
    plan = EvaluationPlan(patterns=("exact",), tasks=("perplexity",), lengths=(300,), samples=1, stride=stride)
    inputs = inputs_of(tokenizer, plan, words=40)
    assert inputs.opening == [tokenizer.eos_token]
    (record,) = Evaluator(model, inputs).records_of(Job("perplexity", 300, None, (0,), ("exact",)))
    whole = torch.tensor(tokenizer(made_up_text(0, 40)).input_ids[:-1])
    assert len(whole) < 300
    report = ra.perplexity(ra.patch_model(model, "exact"), whole)
    assert (record["nll"], record["tokens"]) == (pytest.approx(report.nll, rel=EXACT), len(whole) - 1)
    assert record["bytes"] == record["tokens"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_pieces_as_long_as_their_length_are_not_called_shorter(folder, count):
    model, tokenizer = load(folder)
    if count:
        opened(tokenizer, count)
    plan = EvaluationPlan(patterns=("exact",), tasks=("perplexity",), lengths=(100,), samples=2)
    for words, told in ((90, False), (9, True)):
        evaluator = Evaluator(model, inputs_of(tokenizer, plan, words=words))
        records = evaluator.records_of(Job("perplexity", 100, None, (0,), ("exact",)))
        assert any("Shorter than a length" in remark for remark in remarks_on(plan, records)) == told
