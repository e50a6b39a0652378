"""Generation: the tokens of eager attention, each step a row of the oracle, and no key touched that no query sees."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ring_attention as ra
from hf_ring_attention.compute.batched import BatchedTiles
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.hf.model.wrappers import cache_argument, cache_in
from hf_ring_attention.plan.problem import HeldKeys
from hf_ring_attention.transport.agreement import digest
from tests.hf.alike import assert_on_ranks, refused
from tests.support.cached import cached_attention
from tests.support.cases import random_case, random_pattern
from tests.support.probe import distance
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT

#: Grouped heads, sliding layers, softcap, sinks with logits, latent attention, absolute positions from position_ids or mask.
TYPES = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2", "opt")
WAYS = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
}
PROMPT, NEW = 17, 5


def prompt(padded=True):
    """Ids and mask [3, PROMPT]; the last row has one token."""
    ids = torch.randint(3, VOCAB, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
        mask[2, : PROMPT - 1] = 0
    return ids, mask


class Generated(NamedTuple):
    """The tokens, and the logits behind them [tokens, B, VOCAB]: tiny models tend to repeat themselves."""

    sequences: torch.Tensor
    logits: torch.Tensor


def generate(model, ids, mask, **ways):
    torch.manual_seed(3)
    ways |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, attention_mask=mask, **ways)
    return Generated(output.sequences, torch.stack(output.logits))


def same(found, expected):
    return torch.equal(found.sequences, expected.sequences) and distance(found.logits, expected.logits) <= EXACT


@pytest.mark.drawn(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_of_eager(model_type, way):
    ids, mask = prompt()
    expected = generate(tiny_model(model_type, "eager"), ids, mask, **WAYS[way])
    assert same(generate(tiny_model(model_type, "ring_dilated"), ids, mask, **WAYS[way]), expected)


def test_a_step_is_a_row_of_the_oracle(rng):
    """Of 25 random problems: held keys in float64, output and gradients."""
    for _ in range(25):
        case = replace(random_case(rng, max_len=30), pattern=random_pattern(rng))
        n, unwritten = case.seq_len, rng.randrange(4)
        case = replace(case, documents=[[(0, n)], *[[(n // 3, n)]] * (case.batch - 1)])
        new = rng.choice([n, rng.randint(1, n)])
        *whole, grad, sinks = case.tensors
        inputs = [x.requires_grad_() for x in (*whole, sinks) if x is not None]
        (q, k, v), grad = whole, grad[:, :, n - new :]
        expected = reference_attention(q, k, v, sinks=sinks, **case.options)[0][:, :, n - new :]
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, unwritten), value=9.0) for x in (k, v))
        held = HeldKeys.whole(n, new, n + unwritten)
        found = cached_attention(q[:, :, n - new :], keys, values, held=held, sinks=sinks, **case.options)
        pairs = zip(*((out, *torch.autograd.grad(out, inputs, grad)) for out in (found, expected)))
        assert max(float((x - y).detach().abs().max()) for x, y in pairs) <= 1e-11, f"{new} new tokens of {case}"


def test_a_step_touches_only_visible_keys(monkeypatch):
    """Rows that kernels are given at a step with 4096 tokens in the cache."""
    pattern = ra.Pattern.pyramid(64, levels=3)
    tokens, rows = 4096, []
    parts = BatchedTiles._parts

    def counted(tiles, q, part_of_queries):
        for part in parts(tiles, q, part_of_queries):
            rows.append(part.keys.rows_per_unit * part.keys.units)
            yield part

    monkeypatch.setattr(BatchedTiles, "_parts", counted)
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, tokens, 8)
    cached_attention(q, k, k, pattern=pattern, held=HeldKeys.whole(tokens, 1, tokens))
    visible = sum(
        min(1, pattern.multiplicity(tokens - 1, key, head=2 * head, num_heads=4, num_kv_heads=2))
        for head in range(2)
        for key in range(tokens)
    )
    assert sum(rows) == visible < tokens / 10 * 2


def test_a_sliding_cache_with_a_pattern_that_reaches_further():
    model = ra.patch_model(tiny_model("mistral", "eager"))
    ra.patch_config(model.config, "pyramid:3,3,2,2", layers=[1])
    ids, mask = prompt(padded=False)
    said = r"MistralAttention: layer 1 .*keeps only .* 6 tokens: .*DynamicCache\(\)"
    dropping = cache_argument(DynamicCache(config=model.config))
    refused(said, generate, model, ids, mask, do_sample=False, **dropping)
    expected = generate(model, ids, mask, do_sample=False, use_cache=False)
    assert same(generate(model, ids, mask, do_sample=False), expected)  # with a PatternCache
    assert same(generate(model, ids, mask, do_sample=False, **cache_argument(DynamicCache())), expected)


def test_what_steps_refuse():
    attention, layer = ALL_ATTENTION_FUNCTIONS["ring_dilated"], llama().model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 20, 8)
    said = r"LlamaAttention: the mask has 3 tokens, for 3 query and 20 key tokens"
    refused(said, attention, layer, q, k, k, torch.ones(1, 3))
    said = r"LlamaAttention: 3 query tokens for 20 key tokens without causality"
    refused(said, attention, layer, q, k, k, None, is_causal=False, error=NotImplementedError)


# ---- on a ring


def test_wrong_calls_of_a_sharded_cache_are_refused_on_every_rank():
    ids, question = tokens(PROMPT, batch=3), tokens(4, batch=3, seed=2)

    def work(ring, model):
        cache = ra.prefill(model, ids)
        of_cache, short = cache_argument(cache), {"attention_mask": torch.ones_like(question)}
        for message, call, *arguments, settings in (
            ("disagree on input_ids", model, question + (ring.rank == 1), of_cache),
            ("disagree on input_ids", ra.prefill, model, ids + ring.rank, {}),
            (r"input_ids must be \[batch, tokens\], like the mask, got \(17,\)", ra.prefill, model, ids[0], {}),
            ("crop takes minus the number of tokens to remove", cache.crop, 1, {}),
            (
                "the cache holds 17 tokens, .*: pass generate all tokens, those in the cache first",
                greedy,
                model,
                question,
                of_cache,
            ),
            (r"expected an attention_mask \[3, 21\], got \(3, 4\)", model, question, short | of_cache),
        ):
            refused(message, call, *arguments, **settings)

    on_ranks(work, llama, layout="zigzag")


@pytest.mark.parametrize("model_type", ["gemma3n_text", "roberta", "whisper"])
def test_sharded_keys_of_odd_types(model_type):
    """Layers that take the keys of others; positions that begin behind the padding's; positions that the model makes."""
    ids, mask = prompt(padded=model_type == "roberta")
    whole = torch.cat([ids, ids[:, :4] + 1], 1)
    rows = torch.nn.functional.pad(mask, (0, 4), value=1)
    expected = generate(ra.patch_model(tiny_model(model_type, "eager")), whole, rows, do_sample=False)

    def work(ring, model):
        model.train().base_model.eval()
        with torch.no_grad():
            cache = ra.prefill(model, ids, mask)
            assert model.training and not model.base_model.training
            model.eval()
            assert same(generate(model, whole, rows, **cache_argument(cache), do_sample=False), expected)
            cache.crop(PROMPT - cache.get_seq_length())
        if model_type == "whisper":
            said = "takes no position_ids, so its generate would number padded rows differently"
            refused(said, ra.prefill, model, ids, prompt()[1])
        refused(r"make another one with ra\.prefill", cache.reset)
        hole = rows.clone()
        hole[:, 9] = ring.rank
        said = r"hides other tokens than before|refused the call"
        refused(said, model, whole[:, PROMPT:], attention_mask=hole, **cache_argument(cache))

    on_ranks(work, lambda: tiny_model(model_type, "eager"))


# ---- steps on top of a sharded cache, however their tensors lie in memory


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.0]}
LENGTH = {"original_max_position_embeddings": 20}
LONGROPE = {**LENGTH, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS, **LENGTH}}


def tokens(count, batch=1, seed=1):
    return torch.randint(3, VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids, **options):
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, **options}
    return model.generate(ids, do_sample=False, **options)


def llama():
    return tiny_model("llama", "eager")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_a_checksum_is_of_the_content_and_not_of_its_place_in_memory(dtype):
    x = torch.randint(2, (4, 6)).to(dtype)
    for view in (x.T, x[:, ::2], x[:, 1:2], x[:, :1].expand(4, 3), x[..., None].transpose(0, 2)):
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))
        assert digest(view) != digest(1 - view.long())


def test_a_generation_that_gives_up_its_cache_goes_on_with_whole_rows():
    document, question = tokens(15), tokens(3, seed=2)
    whole = torch.cat([document, question], 1)
    one = ra.patch_model(tiny_model("phi3", "eager", **LONGROPE))
    longer = torch.cat([tokens(25, seed=3), question], 1)
    expected = [greedy(one, row) for row in (whole, longer)]

    def work(ring, model):
        caches = ra.prefill(model, document), ra.prefill(model, longer[:, :25])
        found = [greedy(model, row, **cache_argument(cache)) for row, cache in zip((whole, longer), caches)]
        assert caches[0].get_seq_length() == 20
        return found

    assert_on_ranks(work, lambda: tiny_model("phi3", "eager", **LONGROPE), expected)


def test_strided_tokens_are_prefilled_and_stepped():
    document, ways = tokens(34)[:, ::2], [{}]
    row = torch.cat([document, tokens(4, seed=2)], 1)
    expected, chunks = greedy(llama(), row), {"prefill_chunk_size": 2}
    cache = cache_argument(cache_in(llama()(document, use_cache=True)))
    # Transformers did not always give chunks after a cache the mask of all tokens.
    ways += [chunks] if torch.equal(greedy(llama(), row, **cache, **chunks), expected) else []

    def work(ring, model):
        return [greedy(model, row, **cache_argument(ra.prefill(model, document)), **way) for way in ways]

    assert_on_ranks(work, llama, [expected] * len(ways))


def test_generation_over_a_ring():
    """Without a cache each step computes the whole row again, and the ranks share it; with one, every rank computes all."""
    ids, mask = prompt()
    expected = generate(ra.patch_model(llama(), "window:6+2"), ids, mask, do_sample=False)

    def work(ring, model):
        assert cache_in(model(ids)) is None, "a refusal that names the remedy"
        return [generate(model, ids, mask, do_sample=False, **way) for way in ({"use_cache": False}, {})]

    assert_on_ranks(work, lambda: ra.patch_model(llama(), "window:6+2"), [expected, expected])


@pytest.mark.parametrize(
    ("told", "packed"),
    [
        ({"seq_idx": torch.zeros(1, PROMPT).int()}, {"seq_idx": torch.arange(PROMPT).ge(4).int()[None]}),
        ({"cu_seq_lens_q": torch.tensor([0, PROMPT])}, {"cu_seq_lens_q": torch.tensor([0, 4, PROMPT])}),
    ],
)
def test_a_collator_that_describes_one_document_a_row(told, packed):
    """Only rows of several documents have no cache."""
    ids, model = prompt()[0][:1], ra.patch_model(llama())
    assert torch.equal(greedy(model, ids, **told), greedy(llama(), ids))
    refused(r"seq_idx or the mask\) have no cache: pass use_cache=False", greedy, model, ids, **packed)
