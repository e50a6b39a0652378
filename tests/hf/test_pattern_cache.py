"""`PatternCache`: the logits and tokens of a whole cache, from the rows that a pattern can still see."""

import copy
import gc
import itertools
import logging

import pytest
import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.compute.private import prompt_is_cut
from hf_ring_attention.hf.cache import cache_argument, cache_in
from hf_ring_attention.hf.config import warn_once
from hf_ring_attention.plan.kept import cache_rows
from tests.fuzz import run_many
from tests.hf.alike import assert_on_ranks, refused
from tests.support.cache_cases import TYPES, draw_cache_case, run_cache_case
from tests.support.random_cases import CACHELESS, SUPPORTED, WITHOUT_SHIFT
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model
from tests.support.tolerance import EXACT, distance

pytestmark = pytest.mark.own_dtypes  # float64 where a case says so

CASES = 25


def ids_of(batch, length, seed=1):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def llama(pattern="window:4+2", **changes):
    return ra.patch_model(tiny_model("llama", "eager", **changes).double(), pattern)


@torch.no_grad()
def step(model, ids, cache, mask=None):
    return model(ids, attention_mask=mask, use_cache=True, **cache_argument(cache)).logits


def greedy(model, ids, cache=None, **options):
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    options |= {} if cache is None else cache_argument(cache)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def test_random_cases_are_those_of_a_whole_cache(rng):
    report = run_many(rng.randrange(10**6), ["cache"], cases=CASES)
    print(report)
    assert not report.failed, "\n".join(report.failed)
    assert report.outcomes["equal cache"] > CASES / 3


def test_a_wrong_row_is_noticed(monkeypatch):
    """The comparison of random cases finds a window that is too short by one row."""
    from hf_ring_attention.hf import kept_rows
    from hf_ring_attention.plan.kept import kept_keys

    def suits(case):
        plain = case.patterns and not case.padding and all(isinstance(step, int) for step in case.steps)
        return case.model_type == "llama" and case.dtype == torch.float64 and len(case.steps) > 3 and plain

    numbers = itertools.count(7100)  # Most of the numbers below have other cases.
    case = next(x for x in map(draw_cache_case, numbers) if suits(x) and run_cache_case(x) == "equal")

    def fewer(*arguments):
        return [kept._replace(first=kept.first + 1) for kept in kept_keys(*arguments)]

    monkeypatch.setattr(kept_rows, "kept_keys", fewer)
    with pytest.raises(AssertionError, match="apart"):
        run_cache_case(case)


#: Types whose text model generates by itself with a whole cache.
GENERATING = sorted(set(SUPPORTED) - WITHOUT_SHIFT - CACHELESS)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", GENERATING)
def test_every_causal_type(model_type):
    """A few tokens under windows with sinks: the tokens of a whole cache."""
    model = tiny_model(model_type, "eager")
    if not model.can_generate():
        pytest.skip("it does not generate")
    ra.patch_model(model, "window:5+2")
    config, ids = model.config.get_text_config(), ids_of(2, 13)
    kinds = " ".join(getattr(config, "layer_types", None) or ())
    hybrid = any(kind in kinds for kind in ("linear", "conv", "hybrid"))
    if model_type in ("diffllama", "minimax", "recurrent_gemma"):
        refused("pass cache_implementation='dynamic'", ra.PatternCache, model, error=NotImplementedError)
        return
    cache = ra.PatternCache(model)
    whole = DynamicCache(config=config) if hybrid else DynamicCache()
    found, expected = greedy(model, ids, cache), greedy(model, ids, whole)
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == 13 + 7


# ---- generate by itself


def test_generate_uses_it_by_itself(caplog):
    warn_once.cache_clear()
    model, ids = llama(), ids_of(2, 20)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            output = greedy(model, ids, return_dict_in_generate=True)
    assert isinstance(cache_in(output), ra.PatternCache)
    assert [x.message for x in caplog.records if "PatternCache" in x.message] == [
        "generate keeps only the rows that the pattern of LlamaForCausalLM can still see (ra.PatternCache): pass "
        "cache_implementation='dynamic' to keep all rows"
    ]
    assert torch.equal(output.sequences, greedy(model, ids, cache_implementation="dynamic"))


@pytest.mark.parametrize(
    ("pattern", "options", "kind"),
    [
        ("window:4+2", {}, ra.PatternCache),
        ("kv0=exact;kv1=window:4", {}, ra.PatternCache),
        ("exact", {}, DynamicCache),
        ("branches:window=4,last=3", {}, DynamicCache),
        ("window:4+2", {"cache_implementation": "dynamic"}, DynamicCache),
        ("window:4+2", {"use_cache": False}, type(None)),
    ],
)
def test_what_decides_the_cache_of_generate(pattern, options, kind):
    for model in (llama(pattern), copy.deepcopy(llama(pattern))):
        output = greedy(model, ids_of(1, 9), return_dict_in_generate=True, **options)
        assert type(cache_in(output)) is kind


def test_a_model_that_is_loaded_by_name_and_other_contexts(tmp_path):
    ids = ids_of(1, 12)
    model = llama()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    output = greedy(loaded, ids, return_dict_in_generate=True)
    assert isinstance(cache_in(output), ra.PatternCache)
    assert torch.equal(output.sequences, greedy(model, ids))
    with ra.exact_attention(model):
        exact = greedy(model, ids, return_dict_in_generate=True)
        assert type(cache_in(exact)) is DynamicCache
        refused("lacks keys that exact_attention needs", greedy, model, ids, ra.PatternCache(model))


def test_every_rank_of_a_ring_may_have_one():
    """As with every cache of the caller, all ranks then compute whole rows."""
    ids = ids_of(2, 15)
    assert_on_ranks(lambda ring, model: greedy(model, ids, ra.PatternCache(model)), llama, greedy(llama(), ids))


# ---- memory


@pytest.mark.parametrize("pattern", ["window:16+4", "pyramid:8,3,2", "longnet:16/1,64/4", "kv0=exact;kv1=window:16"])
def test_bytes_follow_the_formula(pattern):
    model = llama(pattern).float()
    cache = ra.PatternCache(model)
    step(model, ids_of(2, 100), cache)
    config, before = model.config, cache.nbytes
    for n in range(101, 300):
        step(model, ids_of(2, 1, seed=n), cache)
        rows = cache_rows(ra.Pattern.parse(pattern), config.num_attention_heads, config.num_key_value_heads, n)
        expected = rows * config.num_hidden_layers * 2 * 2 * config.head_dim * 4
        # A prompt that ends in a block does not hold the rows of blocks before.
        assert cache.nbytes / expected < 1.05, n
        assert cache.nbytes >= expected or n < 200, n
    assert ("window" in pattern) or ("pyramid" in pattern) or cache.nbytes > 1.2 * before


@torch.no_grad()
def test_memory_is_flat_over_many_tokens():
    """Nothing grows with the number of tokens: neither rows nor what the tables of rows hold."""
    model, one = llama("window:8+2").float(), torch.tensor([[5]])
    cache = ra.PatternCache(model)
    step(model, ids_of(1, 30), cache)
    sizes = []
    for n in range(600):
        model.model(one, use_cache=True, position_ids=torch.tensor([[30 + n]]), **cache_argument(cache))
        if n % 200 == 199:
            gc.collect()
            sizes.append((cache.nbytes, sum(isinstance(x, torch.Tensor) for x in gc.get_objects())))
    assert len({*sizes}) == 1
    assert cache.get_seq_length() == 630
    assert cache.num_rows == 10


def test_a_prompt_leaves_only_its_rows():
    model = llama()
    cache = ra.PatternCache(model)
    step(model, ids_of(1, 200), cache)
    rows = [x for layer in cache.layers for rows in layer.rows for x in rows.tensors]
    assert all(x.untyped_storage().nbytes() <= 6 * x.element_size() * x[:, :, 0].numel() for x in rows)


# ---- turns, copies, lengths


def test_several_turns_and_copies_of_a_prompt():
    model, whole = llama(), ids_of(1, 30)
    cache = ra.PatternCache(model)
    step(model, whole[:, :20], cache)
    kept = copy.deepcopy(cache)
    for _ in range(2):  # The copy is not changed by what the other one reads.
        for stop in (24, 30):
            found = greedy(model, whole[:, :stop], cache, max_new_tokens=3, min_new_tokens=3)
            expected = greedy(model, whole[:, :stop], max_new_tokens=3, min_new_tokens=3, use_cache=False)
            assert torch.equal(found, expected)
            whole = torch.cat([found, ids_of(1, 9, seed=stop)], 1)[:, :30] if stop == 24 else whole
        cache = copy.deepcopy(kept)
        whole = ids_of(1, 30)


def test_cropping():
    model, ids = llama(), ids_of(2, 40)
    cache = ra.PatternCache(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, 20:25], cache)
    cache.crop(-3)  # tokens of the last call
    assert cache.get_seq_length() == 22
    found = step(model, ids[:, 22:24], cache)
    expected = model(ids[:, :24]).logits[:, 22:]
    assert distance(found, expected) <= EXACT
    refused(r"rows that 12 tokens see were dropped, of 24 tokens: call cache.activate_past", cache.crop, -12)
    assert cache.get_seq_length() == 24
    cache.activate_past_recording()
    for n in range(24, 34):
        step(model, ids[:, n : n + 1], cache)
    cache.crop(-10)
    assert distance(step(model, ids[:, 24:30], cache), model(ids[:, :30]).logits[:, 24:]) <= EXACT
    cache.crop(27 - 30)
    refused("crop takes minus the number of tokens to remove, got 27", cache.crop, 27)
    assert cache.get_seq_length() == 27
    assert distance(step(model, ids[:, 27:28], cache), model(ids[:, :28]).logits[:, 27:]) <= EXACT
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    assert distance(step(model, ids[:, :9], cache), model(ids[:, :9]).logits) <= EXACT


@torch.no_grad()
def offloaded(model, ids, cache):
    """A step behind `offload` and `prefetch` of the layers, which Transformers calls around each layer."""
    for layer in cache.layers:
        layer.offload()
        assert all(x.device.type == "cpu" for rows in layer.rows for x in rows.tensors)
        layer.prefetch()
    return step(model, ids, cache)


def compiled(model, ids, cache):
    return step(torch.compile(model, backend="eager"), ids, cache)


def inferred(model, ids, cache):
    """A step in inference mode at even lengths; its rows can be written outside of it."""
    with torch.inference_mode(cache.get_seq_length() % 2 == 0):
        return step(model, ids, cache).clone()


@pytest.mark.parametrize("way", [offloaded, compiled, inferred])
def test_ways_to_take_a_step(way):
    model, ids = llama(), ids_of(1, 16)
    cache = ra.PatternCache(model)
    inferred(model, ids[:, :8], cache)
    for n in range(8, 16):
        found = way(model, ids[:, n : n + 1], cache)
        assert distance(found, model(ids[:, : n + 1]).logits[:, n:]) <= EXACT


# ---- refusals


def wrong_calls():
    """(calls of a model with a cache that holds 9 tokens of 2 rows, what the error says)."""
    ids, ones = ids_of(2, 3), torch.ones(2, 12, dtype=torch.int64)
    hidden, numbers = ones.clone(), ones.clone()
    hidden[0, :2], numbers[:, 6:] = 0, 2
    return {
        "mask of new tokens": ({"input_ids": ids, "attention_mask": ones[:, :3]}, r"holds 9 tokens, and 3 came: .*\[2, 12\]"),
        "mask that changes": ({"input_ids": ids, "attention_mask": hidden}, "hides other tokens than before"),
        "packed": ({"input_ids": ids, "attention_mask": numbers}, "numbers packed documents"),
        "square mask": ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 3, 12)}, r"attention_mask \[2, 12\] was"),
        "rows": ({"input_ids": ids[:1]}, "holds 2 batch rows, and 1 came"),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_calls())
def test_calls_that_do_not_continue_the_rows(name):
    model, (call, message) = llama(), wrong_calls()[name]
    cache = ra.PatternCache(model)
    step(model, ids_of(2, 9), cache)
    with torch.no_grad():
        refused(message, model, **call, use_cache=True, **cache_argument(cache))
    found = step(model, ids_of(2, 1), cache)  # The refusal has left the cache as it was.
    assert distance(found, model(torch.cat([ids_of(2, 9), ids_of(2, 1)], 1)).logits[:, 9:]) <= EXACT


def test_padding_needs_its_mask():
    model, ids = llama(), ids_of(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = ra.PatternCache(model)
    step(model, ids, cache, mask)
    refused("holds padding, and no attention_mask of all tokens came", step, model, ids[:, :1], cache)


def test_other_models_and_patterns():
    said = r"LlamaForCausalLM computes attention by 'eager': call ra\.patch_model"
    refused(said, ra.PatternCache, tiny_model("llama", "eager"))
    model, ids = llama(), ids_of(1, 9)
    cache = ra.PatternCache(model)
    said = r"its keys have no gradient: use torch\.no_grad"
    refused(said, model, ids, use_cache=True, **cache_argument(cache))
    cache = ra.PatternCache(model)
    step(model, ids, cache)
    ra.patch_model(model, "window:5+2")
    for said in (
        r"filled under window:4\+2, and a layer came with the pattern window:5\+2",
        "an earlier call with this PatternCache has failed halfway: make another one",
    ):
        refused(said, step, model, ids[:, :1], cache)
    said = "it serves calls of a patched model: call the model, not its layers"
    refused(said, ra.PatternCache(model).update, ids, ids, 0)


def test_last_queries():
    """They see all keys, so all are kept; a prompt in pieces is refused as with a whole cache."""
    model, ids = llama("branches:window=3,last=4"), ids_of(1, 20)
    cache, whole = ra.PatternCache(model), DynamicCache()
    for start, stop in ((0, 12), (12, 13), (13, 17)):
        found, expected = (step(model, ids[:, start:stop], x) for x in (cache, whole))
        assert distance(found, expected) <= EXACT
    assert cache.num_rows == 17
    for x in (cache, whole):
        refused("shows every key to the last 4 queries of a document, got 5", step, model, ids[:, 12:17], x)
    refused("prefill_chunk_size cuts the prompt", greedy, model, ids, ra.PatternCache(model), prefill_chunk_size=5)
    assert not prompt_is_cut()


def test_the_types_of_random_cases_exist():
    assert all(tiny_config(x) for x in TYPES)
