"""The retrieval recipe: prompts hide what they ask for, losses are those of whole rows, two processes find what one finds."""

import argparse
import json
import random
import re

import common
import pytest
import retrieval
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

import hf_ring_attention as ra
from tests.support.evaluation import load, made_up_text, save_checkpoint
from tests.support.recipe_runs import run
from tests.support.tolerance import EXACT, float64

LENGTH = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    save_checkpoint(folder / "model")
    with pytest.raises(SystemExit, match=r"--pattern own: .* was saved without a pattern: name one"):
        common.check_heads(str(folder / "model"), None)
    ra.patch_config(AutoConfig.from_pretrained(folder / "model"), "window:64+4").save_pretrained(folder / "model")
    (folder / "book.txt").write_text(made_up_text(5))
    return folder


@pytest.fixture(scope="module")
def writer(folder):
    return retrieval.Writer(load(folder / "model")[1], made_up_text(5), seed=0)


def decoded(writer, question):
    prompt, candidates = question
    text = writer.tokenizer.decode(prompt)
    return text, [writer.tokenizer.decode([*prompt, *ids]).removeprefix(text) for ids in candidates]


@pytest.mark.parametrize(("task", "depth"), [("passkey", 0.0), ("needle", 0.3), ("passkey", 1.0), ("needle", 1.0)])
def test_the_first_candidate_alone_follows_from_the_prompt(writer, task, depth):
    prompt, candidates = writer.question(task, LENGTH, depth, 1)
    assert len(prompt) + max(map(len, candidates)) == LENGTH
    text, numbers = decoded(writer, (prompt, candidates))
    asked = text.rpartition("\n")[2]
    hay = text.split("\n\n")[1]
    (found,) = re.findall(rf"{asked} (\d+)\.", hay)
    assert numbers[0] == f" {found}" and len(set(numbers)) == retrieval.CANDIDATES
    assert not any(number.strip() in text for number in numbers[1:])
    before = hay.partition(asked)[0]
    # It stands behind a whole sentence, at most one sentence before its depth.
    assert not before.strip() or before.endswith(". ")
    assert depth * 0.8 * len(hay) - 100 <= len(before) <= depth * len(hay) + 1


def test_questions_follow_from_their_seed_and_number(folder, writer):
    with pytest.raises(SystemExit, match="--tokens 90: a question of passkey takes"):
        writer.question("passkey", 90, 0.0, 0)
    other = retrieval.Writer(load(folder / "model")[1], made_up_text(5), seed=1)
    first = writer.question("needle", LENGTH, 0.5, 0)
    assert first == writer.question("needle", LENGTH, 0.5, 0)
    others = [writer.question("needle", LENGTH, 0.5, 1), other.question("needle", LENGTH, 0.5, 0)]
    assert first not in others and others[0] != others[1]


def test_prompts_open_as_the_tokenizer_opens_texts(folder):
    tokenizer = load(folder / "model")[1]
    special = [("<end>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=special)
    prompt, candidates = retrieval.Writer(tokenizer, made_up_text(5), 0).question("passkey", LENGTH, 0.5, 0)
    assert len(prompt) + max(map(len, candidates)) == LENGTH
    assert [number for number, token in enumerate(prompt) if token == tokenizer.eos_token_id] == [0]


def loss_behind(model, prompt, answer):
    """The sum of the losses of an answer's tokens in one pass over the whole row."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))


@pytest.mark.parametrize("pattern", ["exact", "window:48+4", "pyramid:32,3"])
def test_losses_are_those_of_whole_rows(folder, writer, pattern):
    with float64():
        model = ra.patch_model(load(folder / "model")[0], pattern)
        prompt, candidates = writer.question("needle", LENGTH, 0.4, 0)
        candidates[1] = candidates[1][:3]  # Candidates may have different numbers of tokens.
        losses = retrieval.candidate_losses(model, prompt, candidates)
        assert losses == pytest.approx([loss_behind(model, prompt, ids) for ids in candidates], rel=EXACT)
        assert len(set(losses)) == len(candidates)


def test_figures_are_the_means_of_questions():
    rng, rows = random.Random(0), []
    for pattern in ("exact", "window:9"):
        for depth in (0.0, 1.0):
            row = {"task": "needle", "length": 64, "depth": depth, "pattern": pattern, "rank": rng.randint(1, 8)}
            rows.append(row | {"first": row["rank"] == 1, "probability": rng.random()})
    found = retrieval.mean_of("probability", rows, task="needle", pattern="window:9")
    assert found == (rows[2]["probability"] + rows[3]["probability"]) / 2
    args = argparse.Namespace(tasks=["needle"], lengths=[64], patterns={"exact": None, "window:9": None})
    lines = retrieval.table(rows, args).splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert f"{(rows[0]['rank'] + rows[1]['rank']) / 2:.1f}" in lines[1].split()


def asked(folder, output, *more):
    words = ["--model", folder / "model", "--text", folder / "book.txt", "--tokens", 600, "--depths", 0, 1]
    return [*words, "--pattern", "exact", "window:64+4", "own", "--json", output / "figures.json", *more]


def test_two_processes_find_what_one_finds(folder, tmp_path):
    pytest.importorskip("matplotlib")
    found = []
    for processes, more in ((1, ["--plot", tmp_path / "retrieval.png"]), (2, [])):
        printed = run("retrieval.py", *asked(folder, tmp_path, *more), processes=processes)
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert figures["world_size"] == processes and max(map(len, printed.splitlines()[-6:-1])) <= 80
        assert len(figures["rows"]) == 3 * 2 * 2
        found.append(figures["rows"])
    assert (tmp_path / "retrieval.png").stat().st_size > 5000
    for one, two in zip(*found, strict=True):
        assert one["losses"] == pytest.approx(two["losses"], rel=1e-4)
        assert {**one, "losses": 0, "probability": 0} == {**two, "losses": 0, "probability": 0}
        assert one["rank"] == 1 + sum(loss <= one["losses"][0] for loss in one["losses"][1:])
        chances = torch.tensor(one["losses"]).neg().softmax(0)
        assert one["probability"] == pytest.approx(float(chances[0]), rel=1e-4)
    exact, window, own = (found[0][first : first + 4] for first in (0, 4, 8))
    assert [one["losses"] for one in own] == [one["losses"] for one in window]
    assert all(one["losses"] != other["losses"] for one, other in zip(exact, window, strict=True))
