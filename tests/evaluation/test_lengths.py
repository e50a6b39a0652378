"""Perplexity by length equals plain loops over the model's own logits, on one process and on rings."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import hf_ring_attention as ra
from hf_ring_attention.evaluation import progress
from hf_ring_attention.evaluation.lengths import figures_by_length, nll_of_windows, sum_of_texts, windows_of
from hf_ring_attention.evaluation.texts import opening_tokens, tokenized_text
from tests.support.evaluation import load, made_up_text, save_checkpoint
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
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
    if count:
        end = tokenizer.eos_token
        template = " ".join([*[end] * count, "$A", end])
        special = [(end, tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_windows_open_and_score_each_token_in_the_first_of_them(rng, strided, count):
    """As in the loop of Hugging Face's guide, where labels before the new tokens are ignored.

    Without a stride windows follow each other, and a rest is left out. The first token of a row has no loss.
    """
    model = tiny_llama()
    for _ in range(2):
        length, window = rng.randint(2, 60), rng.randint(5, 30)
        stride, room = rng.randint(1, window) if strided else None, window - count
        opening, ids = torch.randint(1, 97, (count,)), torch.randint(1, 97, (length,))
        windows = windows_of(count + length, window, stride, count)
        nll = nll_of_windows(model, torch.cat([opening, ids]), windows, opening=count)
        step, expected = min(stride or room, room), torch.full((count + length,), torch.nan)
        for begin in range(0, max(length - room + step, 1), step):
            part = ids[begin : begin + room]
            if begin and stride is None and len(part) < room:
                break
            with torch.no_grad():
                logits = model(torch.cat([opening, part])[None]).logits[0, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits, torch.cat([opening, part])[1:], reduction="none")
            losses = torch.cat([torch.full((1,), torch.nan), losses])[count:]
            new = room - step if begin else 0
            expected[count + begin + new : count + begin + room] = losses[new:]
        torch.testing.assert_close(nll.double(), expected.double(), rtol=EXACT, atol=EXACT, equal_nan=True)


def test_windows_that_cannot_be_are_refused():
    refused("from 1 to the window of 8 tokens, got 9", windows_of, 20, 8, 9)
    refused("a window of 2 tokens has no room: 2 tokens open it", windows_of, 9, 2, 1, opening=2)


@pytest.mark.parametrize("count", [0, 2])
def test_texts_open_as_the_tokenizer_opens_them(folder, rng, count):
    tokenizer = opened(load(folder)[1], count)
    end = tokenizer.eos_token_id
    assert opening_tokens(tokenizer).tolist() == [end] * count
    content, length = made_up_text(rng.randrange(100), 200), rng.randint(20, 60)
    text = tokenized_text(content, tokenizer, length)
    whole = tokenizer(content).input_ids
    assert text.ids.tolist() == whole[:length]
    assert text.opening == count
    # Each token is a byte, and those that open stand for none.
    assert text.sizes.tolist() == [0] * count + [1] * (length - count)


def test_bytes_are_those_of_the_text(folder):
    """Letters of several bytes are several tokens here; the last one stands for the letter."""
    tokenizer, content = load(folder)[1], "naïve \u4e2d " * 40
    size = len(content.encode())
    text = tokenized_text(content, tokenizer, 10_000)
    assert len(text.ids) == size == text.size_of(torch.ones(size, dtype=torch.bool))
    for first in range(0, size, 50):
        part = torch.zeros(size, dtype=torch.bool)
        part[first : first + 50] = True
        assert abs(text.size_of(part) - int(part.sum())) <= 2


def test_tokenizers_that_do_not_give_places_give_no_bytes(folder):
    class Slow:
        is_fast = False

        def __call__(self, text, return_offsets_mapping=False, **options):
            assert not return_offsets_mapping
            return tokenizer(text, **options)

    tokenizer = load(folder)[1]
    text = tokenized_text("some words", Slow(), 5)
    assert text.ids.tolist() == tokenizer("some ").input_ids and text.sizes is None
    (one,) = figures_by_length(load(folder)[0], {"a": text}, {"exact": ra.Pattern.exact()}, [5])
    assert one.bits_per_byte is None and sum_of_texts("all", [one, one]).bits_per_byte is None


PATTERNS = {"exact": ra.Pattern.exact(), "pyramid": ra.Pattern.parse("pyramid:8,3,2"), "own": None}


def measured(model, tokenizer, ring=None, patterns=PATTERNS):
    ra.patch_model(model, "window:16+2")
    opened(tokenizer, 1)
    texts = {f"book {seed}": tokenized_text(made_up_text(seed), tokenizer, 131 + seed) for seed in range(2)}
    return figures_by_length(model, texts, patterns, [40, 131], 31, ring)


def test_figures_are_the_sums_of_windows(folder):
    model, tokenizer = load(folder)
    opened(tokenizer, 1)
    figures = measured(model, tokenizer)
    kinds = [*itertools.product(PATTERNS, ("book 0", "book 1"), (40, 131))]
    assert [(one.pattern, one.text, one.length) for one in figures] == kinds
    for one in figures:
        seed = int(one.text[-1])
        ra.patch_model(model, PATTERNS[one.pattern] or "window:16+2")
        ids = tokenized_text(made_up_text(seed), tokenizer, 131 + seed).ids
        nll = nll_of_windows(model, ids, windows_of(len(ids), one.length, 31, 1), opening=1)[1:]
        assert one.tokens == one.size == len(nll) == 130 + seed  # A token is a byte.
        assert one.nll == pytest.approx(float(nll.double().sum()), rel=EXACT)
        assert one.perplexity == pytest.approx(math.exp(one.nll / one.tokens))
        assert one.bits_per_byte == pytest.approx(one.nll / one.tokens / math.log(2))
    assert len({one.nll for one in figures}) == len(figures)
    both = sum_of_texts("all", figures[:3:2])
    assert (both.tokens, both.nll) == (261, figures[0].nll + figures[2].nll)


def test_a_ring_finds_what_one_process_finds(folder):
    patterns = {name: PATTERNS[name] for name in ("exact", "own")}
    expected = measured(*load(folder), patterns=patterns)
    # One after the other: while Transformers loads a model, it ties no weights of models in other threads.
    loaded = [load(folder) for _ in range(2)]
    for found in run_simulated(lambda ring: measured(*loaded[ring.rank], ring, patterns), 2):
        for one, alone in zip(found, expected, strict=True):
            assert replace(one, seconds=0, nll=0) == replace(alone, seconds=0, nll=0)
            assert one.nll == pytest.approx(alone.nll, rel=1e-6)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_bar_moves_with_each_layer_and_ends_at_its_total(checkpointing, monkeypatch):
    """Models without layers that can be checkpointed move it once a row."""
    moves = []
    monkeypatch.setattr(progress.tqdm, "update", lambda bar, n=1: bar.disable or moves.append((n, bar.total)))
    if not checkpointing:
        monkeypatch.setattr(progress, "GradientCheckpointingLayer", int)
    model, ids = tiny_llama(), torch.arange(1, 61).view(2, 30)
    shown, hidden = (ra.perplexity(model, ids, progress=x).token_nll for x in (True, False))
    torch.testing.assert_close(shown, hidden, rtol=0, atol=0, equal_nan=True)
    parts = model.config.num_hidden_layers if checkpointing else 1
    assert [move for move in moves if move[0]] == [(30 / parts, 60)] * parts * 2
    assert not any(module._forward_pre_hooks for module in model.model.layers.modules())
