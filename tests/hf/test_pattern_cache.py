"""`PatternCache`: the logits and tokens of a whole cache, from the rows that a pattern can still see."""

import copy
import gc
import io
import itertools
import logging
import pickle

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, PreTrainedTokenizerFast

import hf_ring_attention as ra
from hf_ring_attention.hf.cache import pattern_layer
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import _warn_of_lost_ring, cache_argument, cache_in
from hf_ring_attention.plan.kept import cache_rows
from tests.fuzz import run_many
from tests.hf.alike import assert_on_ranks, refused
from tests.support.cache_cases import CacheCase, run_cache_case
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT, distance

pytestmark = pytest.mark.own_dtypes  # float64 if a case says so

CASES = 16


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
    from hf_ring_attention.hf.cache import kept_rows
    from hf_ring_attention.plan.kept import kept_keys

    pattern = ra.Pattern.parse("window:6+2")
    steps = {"batch": 2, "steps": (9, 1, 3, 1, 1), "padding": "", "way": None, "few": 64, "kernel": "auto"}
    case = CacheCase(7100, "llama", changes={}, patterns={None: pattern}, dtype=torch.float64, **steps)
    assert run_cache_case(case) == "equal"

    def fewer(*arguments):
        return [kept._replace(first=kept.first + 1) for kept in kept_keys(*arguments)]

    monkeypatch.setattr(kept_rows, "kept_keys", fewer)
    with pytest.raises(AssertionError, match="apart"):
        run_cache_case(case)


@pytest.mark.parametrize(("pattern", "planned"), [("exact", 0), ("window:4+2", 3)])
def test_kernels_that_take_no_bias(pattern, planned, monkeypatch):
    """They read exact rows as they lie, one token at a time; other rows go into their places, for a plan."""
    calls, places = [], pattern_layer.PatternLayer.expanded
    monkeypatch.setattr(pattern_layer, "_BIASED", ())
    monkeypatch.setattr(pattern_layer.PatternLayer, "expanded", lambda *x: calls.append(x) or places(*x))
    model, ids = llama(pattern), ids_of(2, 16)
    cache = ra.PatternCache(model)
    step(model, ids[:, :12], cache)
    found = torch.cat([step(model, ids[:, n : n + 1], cache) for n in range(12, 15)], 1)
    assert distance(found, model(ids[:, :15]).logits[:, 12:]) <= EXACT
    assert len(calls) == planned * model.config.num_hidden_layers
    step(model, ids[:, 14:], cache)  # Two queries need a mask.
    assert len(calls) == (planned + 1) * model.config.num_hidden_layers


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
        ("kv0=exact;kv1=window:4", {}, ra.PatternCache),
        ("exact", {}, ra.PatternCache),
        ("window:4+2", {"cache_implementation": "dynamic"}, DynamicCache),
        ("window:4+2", {"use_cache": False}, type(None)),
    ],
)
def test_what_decides_the_cache_of_generate(pattern, options, kind):
    output = greedy(copy.deepcopy(llama(pattern)), ids_of(1, 9), return_dict_in_generate=True, **options)
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
    for n in range(101, 240):
        step(model, ids_of(2, 1, seed=n), cache)
        rows = cache_rows(ra.Pattern.parse(pattern), config.num_key_value_heads, n)
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
    for n in range(150):
        model.model(one, use_cache=True, position_ids=torch.tensor([[30 + n]]), **cache_argument(cache))
        if n % 50 == 49:
            gc.collect()
            sizes.append((cache.nbytes, sum(isinstance(x, torch.Tensor) for x in gc.get_objects())))
    assert len({*sizes}) == 1
    assert cache.get_seq_length() == 180
    assert cache.num_rows == 10


def test_a_prompt_leaves_only_its_rows():
    model = llama()
    cache = ra.PatternCache(model)
    step(model, ids_of(1, 200), cache)
    rows = [x for layer in cache.layers for rows in layer.rows for x in rows.tensors]
    assert all(x.untyped_storage().nbytes() <= 6 * x.element_size() * x[:, :, 0].numel() for x in rows)


# ---- turns, copies, lengths


def test_cropping():
    model, ids = llama(), ids_of(2, 40)
    cache = ra.PatternCache(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, 20:25], cache)
    cache.crop(-3)  # tokens of the last call
    assert cache.get_seq_length() == 22

    def alike(start, stop):
        found = step(model, ids[:, start:stop], cache)
        assert distance(found, model(ids[:, :stop]).logits[:, start:]) <= EXACT

    alike(22, 24)
    refused(r"rows that 12 tokens see were dropped, of 24 tokens: call cache.activate_past", cache.crop, -12)
    cache.activate_past_recording()
    for n in range(24, 34):
        alike(n, n + 1)
    cache.crop(-10)
    alike(24, 30)
    cache.crop(27 - 30)
    refused("crop takes minus the number of tokens to remove, got 27", cache.crop, 27)
    alike(27, 28)
    alike(28, 29)  # The rows that recording has kept are dropped.
    cache.crop(-1)
    alike(28, 30)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    alike(0, 9)


def test_recording_ends_at_the_next_crop():
    """Only the call behind it is recorded too, so that drafts can go back by any number of tokens."""
    model, ids = llama(), ids_of(1, 100)
    cache = ra.PatternCache(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, 20:21], cache)
    nbytes = cache.nbytes
    cache.crop(-1)
    cache.activate_past_recording()
    step(model, ids[:, 20:30], cache)
    cache.crop(-10)
    step(model, ids[:, 20:90], cache)  # as many as a plan computes
    cache.crop(-65)
    for n in range(25, 100):
        found = step(model, ids[:, n : n + 1], cache)
    assert distance(found, model(ids).logits[:, -1:]) <= EXACT
    assert not cache.recording and cache.num_rows == 6 and cache.nbytes == nbytes


def test_recording_ends_with_rows_of_other_lengths():
    """The last recorded call has several tokens, of rows with padding before them: later tokens see them all."""
    model, ids, mask = llama("window:2+4"), ids_of(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :5] = 0
    cache, lengths = ra.PatternCache(model), (0, 20, 21, 24, 25, 40)
    for start, stop in itertools.pairwise(lengths):
        found = step(model, ids[:, start:stop], cache, mask[:, :stop])
        whole = model(ids[:, :stop], attention_mask=mask[:, :stop]).logits
        assert distance(found[:, -1], whole[:, -1]) <= EXACT
        if stop == 20:
            cache.activate_past_recording()
            cache.crop(0)


def test_rows_of_a_hybrid_that_begin_with_padding_one_token_at_a_time_are_refused():
    """Transformers masks nothing in calls of one token, so the padding would enter the states."""
    model, ids, mask = ra.patch_model(tiny_model("jamba", "eager")), ids_of(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[1, :3] = 0
    said = "rows that begin with padding came one token at a time"
    refused(said, ra.prefill, model, ids[:, :1], mask[:, :1])
    refused(said, model.generate, ids, attention_mask=mask, prefill_chunk_size=1, max_new_tokens=2)
    ra.prefill(model, ids[:, :2], mask[:, :2])


@pytest.mark.parametrize("model_type", ["jamba", "lfm2"])
def test_cropping_of_hybrids(model_type):
    """Recurrent states are kept where recording begins; convolutions are recorded."""
    model, ids = ra.patch_model(tiny_model(model_type, "eager").double(), "window:4+2"), ids_of(2, 20)
    cache, recurrent = ra.PatternCache(model), model_type == "jamba"
    step(model, ids[:, :12], cache)
    refused("no state behind 11 tokens is kept, of 12 tokens: call cache.activate_past_rec", cache.crop, -1)
    cache.crop(0)
    cache.activate_past_recording()
    step(model, ids[:, 12:16], cache)
    if recurrent:
        refused("no state behind 14 tokens is kept", cache.crop, -2)
        cache.reorder_cache(torch.tensor([1, 0]))
    first, rows = (12, ids.flip(0)) if recurrent else (14, ids)
    cache.crop(first - 16)
    expected = model(rows, use_cache=False).logits[:, first:]
    assert distance(step(model, rows[:, first:], cache), expected) <= (1e-6 if recurrent else EXACT)  # float32 states


def test_copies_share_nothing():
    """Whatever is copied first; and files of a model of a ring have no ring."""
    model, ids = llama(), ids_of(1, 24)
    cache = ra.PatternCache(model)
    step(model, ids[:, :20], cache)
    copies = [copy.deepcopy([cache.layers, cache])[1], pickle.loads(pickle.dumps(cache)), cache]
    for n in range(20, 24):
        expected = model(ids[:, : n + 1]).logits[:, n:]
        assert max(distance(step(model, ids[:, n : n + 1], one), expected) for one in copies) <= EXACT


def saved_and_loaded(ring, model):
    torch.save(model, io.BytesIO())
    loaded = pickle.loads(pickle.dumps(model))
    return loaded.generate(ids_of(1, 9), max_new_tokens=4, do_sample=False)


def test_a_saved_model_leaves_its_ring(caplog):
    _warn_of_lost_ring.cache_clear()
    assert_on_ranks(saved_and_loaded, llama, llama().generate(ids_of(1, 9), max_new_tokens=4, do_sample=False))
    assert sum("loaded without its ring" in record.message for record in caplog.records) >= 1


@pytest.mark.parametrize(
    ("model_type", "pattern"), [("llama", "window:4+2"), ("jamba", "window:4+2"), ("minimax", "exact")]
)
def test_prefilled_caches_can_be_pickled(model_type, pattern):
    model, ids = ra.patch_model(tiny_model(model_type, "eager").double(), pattern), ids_of(1, 20)
    cache, short = (
        pickle.loads(pickle.dumps(ra.prefill(model, ids[:, :16]))),
        {"max_new_tokens": 3, "min_new_tokens": 3},
    )
    expected = greedy(model, ids, **short)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, cache, **short), expected)
        cache.crop(16 - cache.get_seq_length())


def tokenizer_of(pieces, merges):
    vocabulary = {piece: number for number, piece in enumerate(["<end>", *pieces])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<end>"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<end>", eos_token="<end>", pad_token="<end>")


@pytest.mark.filterwarnings("ignore")
def test_drafts_of_another_tokenizer(rng):
    """They may be removed far back, so a draft model keeps all rows."""
    pairs = [("a", "b"), ("c", "d")]
    target, draft = tokenizer_of("abcdefghij ", []), tokenizer_of([*"abcdefghij ", "ab", "cd"], pairs)
    model, drafts = (llama(vocab_size=len(x)) for x in (target, draft))
    longest = {"max_new_tokens": 24, "min_new_tokens": 0}
    for _ in range(2):
        ids = target("".join(rng.choices("abcdefghij ", k=30)), return_tensors="pt").input_ids
        of_both = {"assistant_model": drafts, "tokenizer": target, "assistant_tokenizer": draft}
        assert torch.equal(greedy(model, ids, **longest, **of_both), greedy(model, ids, **longest))


def test_layers_that_share_keys_under_other_patterns(caplog):
    """`generate` keeps all rows, beyond the model's own windows, too."""
    model = tiny_model("gemma3n_text", "eager").double()
    ra.patch_model(model, ["window:5+2", "window:3", "pyramid:3,2,2,2", "window:4"])
    warn_once.cache_clear()
    with caplog.at_level(logging.INFO):
        output = greedy(model, ids_of(1, 20), return_dict_in_generate=True)
    assert torch.equal(output.sequences, greedy(model, ids_of(1, 20), use_cache=False))
    assert "PatternCache keeps every row of Gemma3nForCausalLM: layers with other patterns share keys" in caplog.text


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


@pytest.mark.parametrize("way", [offloaded, pytest.param(compiled, marks=pytest.mark.slow), inferred])
def test_ways_to_take_a_step(way):
    model, ids = llama(), ids_of(1, 11)
    cache = ra.PatternCache(model)
    inferred(model, ids[:, :8], cache)
    for n in range(8, 11):
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
        "packed": ({"input_ids": ids, "attention_mask": numbers}, "packed rows .* have no cache"),
        "square mask": ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 3, 12)}, r"expected an attention_mask \[2, 12\]"),
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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_ends_between_two_layers(kind):
    """Also of the first prompt, after which some layers have no rows."""
    model, ids = llama(["window:4+2", "window:9+1"]), ids_of(1, 90)

    def ends(*_):
        raise kind

    for before in (0, 12):
        cache = ra.PatternCache(model)
        if before:
            step(model, ids[:, :before], cache)
        hook = model.model.layers[1].register_forward_pre_hook(ends)
        with pytest.raises(kind):
            step(model, ids[:, before:20], cache)
        hook.remove()
        for n in (64, 1):
            refused("earlier call with this PatternCache has failed halfway", step, model, ids[:, 20 : 20 + n], cache)
        refused("a call has failed halfway", cache.crop, -2)
        cache.reset()
        assert distance(step(model, ids[:, :9], cache), model(ids[:, :9]).logits) <= EXACT


def test_calls_without_all_layers():
    model, ids = llama(), ids_of(1, 20)
    cache, layers = ra.PatternCache(model), model.model.layers
    step(model, ids[:, :9], cache)
    model.config.num_hidden_layers, model.model.layers = 1, layers[:1]
    step(model, ids[:, 9:10], cache)
    model.config.num_hidden_layers, model.model.layers = 2, layers
    refused("a layer holds 9 tokens, and its cache 10", step, model, ids[:, 10:11], cache)


def test_models_that_do_not_compute_by_patterns():
    """They would see the new tokens only."""
    model, ids = llama(), ids_of(1, 10)
    cache = ra.PatternCache(model)
    step(model, ids[:, :9], cache)
    refused("it serves calls of a patched model", step, tiny_model("llama", "sdpa").double(), ids[:, 9:], cache)
    twin = copy.deepcopy(cache)
    assert distance(step(model, ids[:, 9:], twin), model(ids).logits[:, 9:]) <= EXACT
    model.set_attn_implementation("sdpa")
    refused("computes attention by 'sdpa'.*call ra.patch_model", step, model, ids[:, 9:], cache)


@pytest.mark.parametrize(
    ("pattern", "drafts"),
    [
        ("exact", {"prompt_lookup_num_tokens": 3}),
        ("kv0=exact;kv1=window:4", {"assistant_model": True}),
        ("longnet:4/1,16/2,all/4", {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_drafts_beside_a_filled_cache(pattern, drafts):
    """Transformers gives the whole row to the first call of such drafts, whatever is in the cache."""
    model, ids = llama(pattern), ids_of(1, 30)
    drafts = {name: llama() if value is True else value for name, value in drafts.items()}
    for cache in (ra.PatternCache(model), DynamicCache(), ra.prefill(model, ids[:, :29])):
        if not cache.get_seq_length():
            step(model, ids[:, :29], cache)
        said = "holds 29 tokens, and position_ids go back to 0: pass generate all tokens, those in the cache first"
        for options in (cache_argument(cache), cache_argument(cache) | {"attention_mask": None}):
            refused(said, model.generate, ids, max_new_tokens=16, do_sample=False, **drafts, **options)


def test_positions_that_go_on():
    """Left padding, positions from another number on, and a whole row at positions of its own."""
    model, ids = llama(), ids_of(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    for shift in (0, 2):
        cache = ra.PatternCache(model)
        for part in (slice(9), slice(9, 12)):
            more = {"position_ids": places[:, part] + shift, "use_cache": True, **cache_argument(cache)}
            with torch.no_grad():
                found = model(ids[:, part], attention_mask=mask[:, : part.stop], **more).logits
        expected = model(ids, attention_mask=mask, position_ids=places + shift, use_cache=False).logits
        assert distance(found, expected[:, 9:]) <= EXACT
    said = "holds padding, and no attention_mask of all tokens came"
    refused(said, step, model, ids[:, :1], cache)


def test_autocast_on_one_side():
    model, ids = llama().float(), ids_of(1, 10)
    for first, later, every in itertools.product((True, False), (True, False), (True, False)):
        cache = ra.PatternCache(model, every_row=every)
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            step(model, ids[:, :9], cache)
        with torch.autocast("cpu", torch.bfloat16, enabled=later):
            if first == later:
                step(model, ids[:, 9:], cache)
            else:
                refused("use one dtype and one device, autocast included", step, model, ids[:, 9:], cache)


def test_other_models_and_patterns():
    said = r"LlamaForCausalLM computes attention by 'eager': call ra\.patch_model"
    refused(said, ra.PatternCache, tiny_model("llama", "eager"))
    model, ids = llama(), ids_of(1, 9)
    said = r"its keys have no gradient: use torch\.no_grad"
    refused(said, model, ids, use_cache=True, **cache_argument(ra.PatternCache(model)))
    cache = ra.PatternCache(model)
    step(model, ids, cache)
    ra.patch_model(model, "window:5+2")
    said = r"filled under window:4\+2, and a layer came with the pattern window:5\+2"
    refused(said, step, model, ids[:, :1], cache)
    refused("an earlier call with this PatternCache has failed halfway: make another", step, model, ids[:, :1], cache)
    said = "it serves calls of a patched model: call the model, not its layers"
    refused(said, ra.PatternCache(model).update, ids, ids, 0)
