"""Models whose heads have patterns of their own, and layers whose last queries see every key: packed, sharded, generating."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.cache import cache_argument, cache_in
from tests.hf.test_generation import generate, same
from tests.support.dense import DENSE
from tests.support.ranks import run_simulated
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import assert_exact


def model_by_head(model_type="llama"):
    model = tiny_model(model_type, "ring_dilated")
    heads = model.config.get_text_config().num_key_value_heads
    texts = ["exact" if head % 2 else "window:3+1" for head in range(heads)]
    ra.patch_model(model, ra.Pattern.by_kv_head(texts))
    return model


def drawn_ids(tokens, rows=1):
    return torch.randint(3, VOCAB, (rows, tokens))


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def test_keys_of_a_prefilled_cache_are_those_of_each_head():
    model, ids = model_by_head(), drawn_ids(21)
    right = logits(model, ids)[:, -1]

    def run(ring):
        own = model_by_head()
        own.load_state_dict(model.state_dict())
        cache = ra.prefill(ra.patch_model(own, ring=ring), ids[:, :-1])
        with torch.no_grad():
            return own(ids[:, -1:], **cache_argument(cache)).logits[:, -1]

    for found in run_simulated(run, 2):
        assert_exact(found, right, "logits behind a prefilled cache")


def test_a_pattern_for_other_heads_is_refused():
    model = tiny_model("llama", "ring_dilated")
    with pytest.raises(ValueError, match=r"is for 3 key/value heads, and LlamaModel has 2: give one pattern for each"):
        ra.patch_model(model, "kv0-1=exact;kv2=window:4")


# ---- last queries that see every key


#: The layer of TriangleMix, and one whose heads differ.
LAST = 4
LAYERS = ("branches:sink=1,window=3,last=4", "kv0=exact;kv1=branches:window=2,last=5")


def with_last(ring=None):
    model = ra.patch_model(tiny_model("llama", "eager"), ring=ring)
    for layer, text in enumerate(LAYERS):
        ra.patch_config(model.config, text, layers=[layer])
    return model


def dense():
    """The same weights, and attention by the definition with matrices."""
    model = tiny_model("llama", DENSE)
    setattr(model.config, DENSE, {layer: ra.Pattern.parse(text) for layer, text in enumerate(LAYERS)})
    return model


def test_a_row_is_what_the_definition_says():
    ids = drawn_ids(21, rows=2)
    assert_exact(logits(with_last(), ids), logits(dense(), ids), "logits of a row")
    window = ra.patch_model(tiny_model("llama", "eager"), "branches:sink=1,window=3")
    differs = float((logits(window, ids) - logits(with_last(), ids)).abs().max()) > 1e-3
    assert differs, "the last queries see no more than a window"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_beside_a_document_does_not_change_which_queries_are_its_last(side):
    ids = drawn_ids(15)
    alone = logits(with_last(), ids)
    padding, mask = torch.zeros(1, 5, dtype=torch.int64), torch.ones_like(ids)
    parts = [(padding, padding), (ids, mask)]
    parts = parts if side == "left" else parts[::-1]
    row, mask = (torch.cat(columns, 1) for columns in zip(*parts))
    found = logits(with_last(), row, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    assert_exact(found[mask.bool()][None], alone, "logits of the tokens")


@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_documents_each_have_their_last_queries(ranks):
    documents = [drawn_ids(length) for length in (9, 3, 14)]
    expected = torch.cat([logits(dense(), ids) for ids in documents], 1)
    batch = {
        "input_ids": torch.cat(documents, 1),
        "position_ids": torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None],
    }

    def work(ring):
        return logits(with_last(ring), batch["input_ids"], position_ids=batch["position_ids"])

    for found in run_simulated(work, ranks):
        assert_exact(found, expected, f"logits on {ranks} ranks")


def greedy(model, ids, **kwargs):
    return generate(model, ids, torch.ones_like(ids), do_sample=False, **kwargs)


@pytest.mark.parametrize("cache", [None, "static"])
def test_each_new_token_sees_every_key(cache):
    """The definition, with the row as long as it has grown; its cache holds what earlier steps computed."""
    ids = drawn_ids(17, rows=2)
    found = greedy(with_last(), ids, **({} if cache is None else {"cache_implementation": cache}))
    assert same(found, greedy(dense(), ids))


def test_a_question_behind_a_sharded_document_sees_all_of_it():
    """As on one device, whose cache was filled by the document alone too."""
    row = drawn_ids(23)
    document = row[:, : 23 - LAST]

    def filled(model):
        with torch.no_grad():
            return cache_in(model(document, use_cache=True))

    one = dense()
    expected = greedy(one, row, **cache_argument(filled(one)))

    def work(ring):
        model = with_last(ring)
        return greedy(model, row, **cache_argument(ra.prefill(model, document)))

    assert all(same(found, expected) for found in run_simulated(work, 2))


@pytest.mark.parametrize(("chunk", "cache"), [(1, None), (LAST, "static"), (19, None)])
def test_a_prompt_in_pieces_is_refused(chunk, cache):
    """The last queries of a piece would see every key, and those of the prompt were computed before its end is known."""
    row, options = drawn_ids(20), {} if cache is None else {"cache_implementation": cache}
    said = "shows every key to a document's last queries, and prefill_chunk_size cuts the prompt before them: leave it out, or"
    with pytest.raises(ValueError, match=said):
        greedy(with_last(), row, prefill_chunk_size=chunk, **options)
    assert same(greedy(with_last(), row, prefill_chunk_size=20, **options), greedy(dense(), row))


def test_longer_pieces_behind_a_cache_are_refused():
    row, said = drawn_ids(20), r"shows every key to the last 4 queries of a document, got 6 queries behind"

    def work(ring):
        model = with_last(ring)
        cache = ra.prefill(model, row[:, :14])
        with pytest.raises(ValueError, match=said):
            greedy(model, row, **cache_argument(cache))
        return True

    assert run_simulated(work, 2) == [True, True]


def test_a_cache_that_drops_keys_is_refused():
    model = ra.patch_model(tiny_model("mistral", "eager"))
    ra.patch_config(model.config, LAYERS[0], layers=[0])
    with pytest.raises(
        ValueError, match=r"layer 0 has the pattern branches:sink=1,window=3,last=4, and its cache drops keys"
    ):
        greedy(model, drawn_ids(12))
