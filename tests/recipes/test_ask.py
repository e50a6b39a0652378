"""Answers of the recipe ask.py are those of `generate` with a whole cache, and its figures are those of its cache."""

import json

import ask
import common
import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.support.evaluation import load, made_up_text, save_checkpoint
from tests.support.recipe_runs import refused, run
from tests.support.tiny_models import tiny_model

TOKENS = 300
QUESTIONS = ["Who is it?", "What does it do there?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ask")
    save_checkpoint(folder / "model")
    (folder / "book.txt").write_text(made_up_text(5, 200))
    return folder


def asked(folder, file, *more, **how):
    """What it prints, and its figures."""
    words = ["--model", folder / "model", "--text", folder / "book.txt", "--tokens", TOKENS, "--question", *QUESTIONS]
    printed = run("ask.py", *words, "--answer-tokens", 12, "--json", file, *more, **how)
    return printed, json.loads(file.read_text())


def expected(folder, pattern, questions=QUESTIONS):
    """The tokens of the answers, by a cache with every row of the text."""
    model, tokenizer = load(folder / "model", torch.float32)
    ra.patch_model(model.eval(), pattern)
    for question in questions:
        text, tail = ask.written(tokenizer, (folder / "book.txt").read_text(), question, TOKENS)
        prompt = torch.cat([text, tail], 1)
        options = {"max_new_tokens": 12, "do_sample": False, **cache_argument(ra.prefill(model, text))}
        found = model.generate(prompt, **options)
        yield found[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("pattern", ["exact", "window:48+4", "kv0=exact;kv1=window:32"])
def test_answers_are_those_of_a_whole_cache(folder, tmp_path, pattern):
    printed, figures = asked(folder, tmp_path / "one.json", "--pattern", pattern, "--at-once", 70)
    assert [row["tokens"] for row in figures["answers"]] == [*expected(folder, pattern)]
    assert all(question in printed for question in QUESTIONS) and f"read {TOKENS:,} tokens in" in printed
    assert figures["answers"][0]["answer"] in printed
    assert "PatternCache, the rows that the pattern can still see" in printed
    [held] = figures["answers"][-1]["cache_bytes"]
    assert f"cache: {held / 2**20:.1f} MiB" in printed
    # Before the last question, the rows of an answer are kept besides.
    model = ra.patch_model(load(folder / "model", torch.float32)[0], pattern)
    longest = TOKENS + 60 + 12
    assert held <= 1.05 * ra.estimate(model, longest, dtype="float32").cache.kept + 72 * 2 * 2 * 16 * 4


def test_a_model_has_the_pattern_that_it_was_saved_with(folder, tmp_path):
    """Or exact attention; and it reads the whole text."""
    words = ["--text", folder / "book.txt", "--question", QUESTIONS[0], "--answer-tokens", 12]
    model, tokenizer = load(folder / "model", torch.float32)
    ra.patch_model(model, "branches:window=16,sink=9").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for saved, kept in ((folder, "exact"), (tmp_path, "branches:window=16,sink=9")):
        figures = []
        for more in ([], ["--pattern", kept]):
            file = tmp_path / "figures.json"
            assert QUESTIONS[0] in run("ask.py", "--model", saved / "model", *words, "--json", file, *more)
            figures.append(json.loads(file.read_text())["answers"][0])
        assert figures[0]["tokens"] == figures[1]["tokens"] and figures[0]["cache_bytes"] == figures[1]["cache_bytes"]


def test_two_processes_answer_as_one(folder, tmp_path):
    printed, figures = asked(folder, tmp_path / "two.json", "--pattern", "window:48+4", processes=2)
    assert figures["world_size"] == 2 and len(figures["answers"][0]["cache_bytes"]) == 2
    assert [row["tokens"] for row in figures["answers"]] == [*expected(folder, "window:48+4")]
    assert "by ra.prefill, shared by 2 processes" in printed and printed.count(QUESTIONS[1]) == 1


def test_a_text_and_its_question_are_written_by_the_template(folder):
    _, tokenizer = load(folder / "model")
    text, tail = ask.written(tokenizer, " A book. ", "Why?", None)
    assert tokenizer.decode(text[0]) == "A book." and tokenizer.decode(tail[0]) == "\n\nQuestion: Why?\nAnswer:"
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}says:"
    text, tail = ask.written(tokenizer, "A book. Why?", "Why?", 4)
    assert tokenizer.decode(text[0]) == "[A bo" and tokenizer.decode(tail[0]) == "\n\nWhy?]says:"
    with pytest.raises(SystemExit, match="--tokens 40: the text has 7 tokens: name a longer one, or fewer tokens"):
        ask.written(tokenizer, "A book.", "Why?", 40)


def test_latent_attention_keeps_every_row():
    """A latent row is smaller than the keys of all heads."""
    model = ra.patch_model(tiny_model("deepseek_v3", "ring_dilated"), "window:8+2")
    ids = torch.arange(3, 40)[None]
    cache, description = ask.read(model, ids, ra.Ring(), 16, shown=False)
    assert "every row: latent attention" in description and cache.get_seq_length() == 37


def test_the_bar_counts_every_token_once(folder, capsys):
    model, _ = load(folder / "model", torch.float32)
    ra.patch_model(model, "window:16")
    with common.reading(model, 101, shown=True) as bar:
        for piece in (50, 50, 1):
            bar.piece = piece
            model(torch.arange(piece)[None] + 3, use_cache=False)
            before = bar.n
        assert before == 101
    model(torch.arange(9)[None] + 3, use_cache=False)
    assert bar.n == 101 and "reading" in capsys.readouterr().err


def test_an_empty_text_is_refused(folder, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    assert "--text: the file is empty" in refused(
        "ask.py", "--model", folder / "model", "--text", tmp_path / "empty.txt"
    )


def test_a_pattern_of_another_model_is_refused(folder):
    words = ["--model", folder / "model", "--text", folder / "book.txt", "--pattern", "kv0=exact;kv1-2=window:8"]
    assert "key/value heads" in refused("ask.py", *words)
