"""Generation: the tokens of eager attention, each step a row of the oracle, and no key touched that no query sees."""

import itertools

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.plan.problem import HeldKeys
from hf_ring_attention.ring import engine
from hf_ring_attention.ring.attention import cached_attention

from ..support.probe import distance
from ..support.ranks import run_ranks, run_simulated
from ..support.tiny_models import VOCAB, tiny_model
from ..support.tolerance import EXACT

PATTERNS = {
    "exact": None,
    "pyramid": ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2),
    "longnet": ra.Pattern.longnet([4, 12, None], [1, 2, 4]),
}
#: Grouped heads, sliding layers, softcap, sinks with logits, latent attention, absolute positions from position_ids or mask.
TYPES = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2", "opt")
WAYS = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
}
PROMPT, NEW = 17, 8


def prompt(padded=True):
    """Ids and mask [3, PROMPT]; the last row has one token."""
    ids = torch.randint(3, VOCAB, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
        mask[2, : PROMPT - 1] = 0
    return ids, mask


def generate(model, ids, mask, **ways):
    torch.manual_seed(3)
    ways = {
        **ways,
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(ids, attention_mask=mask, **ways)


def same(found, expected):
    """Tokens, and the logits behind them: tiny models tend to repeat themselves."""
    logits, logits_ = (torch.stack(output.logits) for output in (found, expected))
    return torch.equal(found.sequences, expected.sequences) and distance(logits, logits_) <= EXACT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_of_eager(model_type, way):
    ids, mask = prompt()
    expected = generate(tiny_model(model_type, "eager"), ids, mask, **WAYS[way])
    assert same(generate(tiny_model(model_type, "ring_dilated"), ids, mask, **WAYS[way]), expected)


@pytest.mark.parametrize("pattern", ["pyramid", "longnet"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_steps_with_a_cache_are_those_of_the_whole_row(model_type, pattern):
    """Prefill, then steps of several and of one token: the logits of one pass over the whole row."""
    model = ra.patch_model(tiny_model(model_type, "eager"), PATTERNS[pattern])
    ids, mask = prompt()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache, found = DynamicCache(config=model.config), []
        for start, stop in itertools.pairwise((0, 7, 12, *range(13, PROMPT + 1))):
            logits = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
            ).logits
            found.append(logits)
    assert distance(torch.cat(found, 1)[mask.bool()], expected[mask.bool()]) <= EXACT


def test_a_step_is_a_row_of_the_oracle():
    """Of 100 random problems: held keys in float64, output and gradients."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    seed = generator.initial_seed()

    def choose(options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    for case in range(100):
        n, (heads, kv_heads) = choose(range(1, 30)), choose([(4, 2), (4, 4), (2, 1)])
        new, unwritten, causal = choose(range(1, n + 1)), choose(range(4)), choose([True, True, False])
        pattern = choose([ra.Pattern.exact(), ra.Pattern((ra.Window(5),)), PATTERNS["pyramid"], PATTERNS["longnet"]])
        softcap = choose([None, 2.0])
        q, k, v = (
            torch.randn(2, h, n, d, dtype=torch.float64, generator=generator).requires_grad_()
            for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, 6))
        )
        sinks = (
            torch.randn(heads, dtype=torch.float64, generator=generator).requires_grad_() if choose([0, 1]) else None
        )
        options = {"pattern": pattern, "documents": [[(0, n)], [(n // 3, n)]], "causal": causal, "softcap": softcap}
        expected, _ = reference_attention(q, k, v, sinks=sinks, **options)
        expected = expected[:, :, n - new :]
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, unwritten), value=9.0) for x in (k, v))
        held = HeldKeys.whole(n, new, n + unwritten)
        out = cached_attention(q[:, :, n - new :], keys, values, held=held, sinks=sinks, **options)
        grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        pairs = zip(
            [out, *torch.autograd.grad(out, inputs, grad)], [expected, *torch.autograd.grad(expected, inputs, grad)]
        )
        for found, wanted in pairs:
            assert float((found - wanted).detach().abs().max()) <= 1e-11, f"seed {seed}, case {case}: {options}"


def test_a_step_touches_only_visible_keys(monkeypatch):
    """Rows that kernels are given at a step with 4096 tokens in the cache."""
    pattern = ra.Pattern.pyramid(64, levels=3)
    tokens, rows = 4096, []
    kernel = engine._parts

    def counted(batches, q):
        for part in kernel(batches, q):
            rows.append(part.keys.rows_per_unit * part.keys.units)
            yield part

    monkeypatch.setattr(engine, "_parts", counted)
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
    ra.patch_config(model.config, PATTERNS["pyramid"], layers=[1])
    ids, mask = prompt(padded=False)
    with pytest.raises(
        ValueError, match=r"MistralAttention: layer 1 .*keeps only the last tokens \(.*own window has 6 tokens.*DynamicCache\(\)"
    ):
        generate(model, ids, mask, do_sample=False)
    expected = generate(model, ids, mask, do_sample=False, use_cache=False)
    assert same(generate(model, ids, mask, do_sample=False, past_key_values=DynamicCache()), expected)


def test_what_steps_refuse():
    model = ra.patch_model(tiny_model("llama", "eager"))
    ids, mask = prompt(padded=False)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"LlamaAttention: the mask has 3 tokens, for 3 query and 20 key tokens"):
        model(ids[:, :3], attention_mask=mask[:, :3], past_key_values=_hidden(cache))
    attention = ALL_ATTENTION_FUNCTIONS["ring_dilated"]
    layer = model.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r"LlamaAttention: 3 query tokens for 5 key tokens without causality"):
        attention(layer, q, k, k, None, is_causal=False)


def _hidden(cache):
    """The cache, of which the mask function is told that it is empty."""

    class Hidden(DynamicCache):
        def get_mask_sizes(self, query_length, layer_idx):
            return query_length, 0

        def get_query_offset(self, layer_idx):
            return 0

    hidden = Hidden()
    hidden.layers = cache.layers
    return hidden


# ---- on a ring


def sharded(rank):
    """What differs from one device's tokens, and what wrong calls say."""
    torch.set_grad_enabled(True)
    wrong = []
    ids, mask = prompt()
    question = torch.randint(3, VOCAB, (3, 4), generator=torch.Generator().manual_seed(2))
    whole = torch.cat([ids, question], 1)
    cases = itertools.product(TYPES, ("contiguous", "zigzag"), PATTERNS)
    for number, (model_type, layout, pattern) in enumerate(cases):
        padded = bool(number % 2)
        rows = mask if padded else torch.ones_like(mask)
        rows = torch.nn.functional.pad(rows, (0, 4), value=1)
        name, ways = list(WAYS.items())[(0, 2, 3)[number // 2 % 3]]
        one = ra.patch_model(tiny_model(model_type, "eager"), PATTERNS[pattern])
        expected = generate(one, whole, rows, **ways)
        model = ra.patch_model(one, ring=ra.Ring(layout=layout))
        cache = ra.prefill(model, ids, mask if padded else None)
        if name == "beams":
            cache.batch_repeat_interleave(3)
        if not same(generate(model, whole, rows, past_key_values=cache, **ways), expected):
            wrong.append((model_type, layout, pattern, padded, name))
        if name == "greedy":  # the same question once more
            cache.crop(PROMPT - cache.get_seq_length())
            if not same(generate(model, whole, rows, past_key_values=cache, **ways), expected):
                wrong.append((model_type, layout, pattern, padded, "again"))
    said = []
    cache = ra.prefill(model, ids)
    for call in (
        lambda: model(question + (rank == 1), past_key_values=cache),
        lambda: generate(model, ids, mask),
        lambda: model(ids, past_key_values=DynamicCache(), position_ids=torch.arange(PROMPT)[None]),
        lambda: ra.prefill(model, ids + rank),
        lambda: ra.prefill(model, ids[0]),
        lambda: cache.crop(-1),
    ):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    traffic = model._ring_dilated_ring
    return wrong, said, traffic.world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_keys(world_size):
    """Documents prefilled over a ring, then questions: the tokens of one device, in every layout, pattern and way."""
    for wrong, said, size in run_ranks(sharded, world_size):
        assert size == world_size
        assert wrong == []
        for text, expected in zip(
            said,
            (
                "disagree on the tokens of a step",
                "ra.prefill(model, input_ids)",
                "takes no DynamicCache",
                "disagree on a checksum of input_ids",
                "input_ids must be [batch, tokens], got (17,)",
                "a sharded cache keeps the 17 tokens it was filled with",
            ),
            strict=True,
        ):
            assert expected in text


@pytest.mark.parametrize("model_type", ["gemma3n_text", "roberta", "whisper"])
def test_sharded_keys_of_odd_types(model_type):
    """Layers that take the keys of others; positions that begin behind the padding's; positions of its own."""
    ids, mask = prompt(padded=model_type == "roberta")
    whole = torch.cat([ids, ids[:, :4] + 1], 1)
    rows = torch.nn.functional.pad(mask, (0, 4), value=1)
    expected = generate(ra.patch_model(tiny_model(model_type, "eager")), whole, rows, do_sample=False)
    models = [tiny_model(model_type, "eager") for _ in range(2)]

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring).train()
        model.base_model.eval()
        with torch.no_grad():
            cache = ra.prefill(model, ids, mask)
            assert model.training and not model.base_model.training
            model.eval()
            for _ in range(2):
                assert same(generate(model, whole, rows, past_key_values=cache, do_sample=False), expected)
                cache.crop(PROMPT - cache.get_seq_length())
        if model_type == "whisper":
            with pytest.raises(ValueError, match="would number padded rows differently"):
                ra.prefill(model, ids, prompt()[1])
        with pytest.raises(ValueError, match=r"make another one with ra\.prefill"):
            cache.reset()
        hole = rows.clone()
        hole[:, 9] = ring.rank
        with pytest.raises(ValueError, match=r"padding inside a document|refused the call"):
            model(whole[:, PROMPT:], attention_mask=hole, past_key_values=cache)

    run_simulated(work, 2)
