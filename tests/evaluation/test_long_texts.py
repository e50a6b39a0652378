"""Perplexity with a stride and LongPPL are those of plain loops over the model's own logits."""

import math

import pytest
import torch

from hf_ring_attention.evaluation.evaluator import Evaluator, losses_by_position, position_edges
from hf_ring_attention.evaluation.inputs import EvaluationInputs
from hf_ring_attention.evaluation.jobs import EvaluationPlan, jobs_of
from hf_ring_attention.evaluation.long_perplexity import short_context_nll, tokens_that_gain
from hf_ring_attention.evaluation.strides import stride_nll
from hf_ring_attention.evaluation.texts import EvaluationText
from tests.support.evaluation import load, save_checkpoint
from tests.support.tolerance import EXACT
from tests.support.training import tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")


def losses_of(model, ids):
    """[n - 1] losses of the tokens but the first, from the model's logits."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def guide(model, ids, window, stride):
    """The sum and the number of losses, as in the loop of Hugging Face's guide: labels before the new ones are ignored."""
    nll, tokens, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        labels = ids[begin:end].clone()
        labels[: -(end - before)] = -100
        with torch.no_grad():
            logits = model(ids[None, begin:end]).logits[0, :-1].float()
        nll += float(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
        tokens += int((labels[1:] != -100).sum())
        before = end
        if end == len(ids):
            break
    return nll, tokens


def test_a_stride_is_that_of_the_guide(rng):
    model = tiny_llama()
    for _ in range(6):
        length, window = rng.randint(2, 90), rng.randint(2, 40)
        stride = rng.randint(1, window)
        ids = torch.randint(1, 97, (length,))
        nll = stride_nll(model, ids, window, stride)
        scored = ~nll.isnan()
        expected, tokens = guide(model, ids, window, stride)
        assert int(scored.sum()) == tokens, (length, window, stride)
        assert float(nll[scored].double().sum()) == pytest.approx(expected, rel=EXACT)
        assert not scored[0] and (stride == window or int(scored.sum()) == length - 1)


def test_a_stride_reads_texts_of_many_bytes_a_character_whole(tmp_path):
    """And counts the bytes of the tokens that are scored, and no others."""
    save_checkpoint(tmp_path)
    model, tokenizer = load(tmp_path)
    text = EvaluationText("cafés", "\u00e9\u4e2d " * 50)
    for stride, window in ((8, 32), (32, 32)):
        plan = EvaluationPlan(patterns=("exact",), tasks=("perplexity",), lengths=(window,), stride=stride)
        inputs = EvaluationInputs(tokenizer, [text], plan)
        (piece,) = inputs.pieces[window]
        assert len(piece.ids) == len(text.content.encode()) == 300
        (record,) = Evaluator(model, inputs).records_of(jobs_of(plan, {"perplexity": inputs.counts("perplexity")})[0])
        windows = 1 if stride < window else 10
        assert record["tokens"] == 300 - windows
        scored = torch.ones(300, dtype=torch.bool)
        scored[:: 32 if stride == window else 300] = False
        assert record["bytes"] == piece.size_of(scored) and 290 - windows <= record["bytes"] <= 300


def test_a_stride_beyond_the_window_is_refused():
    with pytest.raises(ValueError, match="from 1 to the window of 8 tokens, got 9"):
        stride_nll(tiny_llama(), torch.arange(20), 8, 9)


def test_long_tokens_are_those_of_the_paper_one_by_one(rng):
    """Of each token: the loss with all tokens before it, and that with the context that it shares with its neighbours."""
    model = tiny_llama(pattern=None)
    short, sharing = rng.randint(4, 12), rng.randint(2, 9)
    ids = torch.randint(1, 97, (60,))
    long = losses_of(model, ids)
    alpha, beta = 0.05, -6.0
    expected = []
    for token in range(short, 60):
        first = (token - short) // sharing * sharing
        own_long, own_short = float(long[token - 1]), float(losses_of(model, ids[first : token + 1])[-1])
        if own_short - own_long > alpha and own_long < -beta:
            expected.append(token)
    short_nll = short_context_nll(model, ids, short, sharing)
    assert int(short_nll.isnan().sum()) == short
    long_nll = torch.cat([torch.tensor([math.nan]), long])
    assert tokens_that_gain(long_nll, short_nll, alpha, beta) == expected
    assert 0 < len(expected) < 60 - short, "every token gains, or none"


def test_the_papers_thresholds_are_the_defaults():
    long, short = torch.tensor([1.0, 1.0, 2.1, math.nan]), torch.tensor([3.1, 2.9, 9.0, 9.0])
    assert tokens_that_gain(long, short) == [0]


def test_buckets_of_positions_hold_every_loss_once(rng):
    length = rng.randint(70, 700)
    nll = torch.rand(length, dtype=torch.float32)
    nll[0] = math.nan
    edges = position_edges(length)
    assert edges[0] == 1 and edges[-1] == length and sorted(set(edges)) == edges
    buckets = losses_by_position(nll, length)
    assert sum(tokens for _, _, tokens in buckets) == length - 1
    assert sum(loss for _, loss, _ in buckets) == pytest.approx(float(nll[1:].double().sum()), rel=1e-12)
    assert [first for first, _, _ in buckets] == edges[:-1]
