"""Steps on top of a sharded cache: however their tensors lie in memory, and what is wrong with those that do not fit."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.cache import cache_argument, cache_in
from hf_ring_attention.transport.agreement import digest
from tests.support.probe import distance
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT

LONGROPE = {
    "original_max_position_embeddings": 20,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 1.0],
        "original_max_position_embeddings": 20,
    },
}


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


def test_strided_tokens_are_prefilled_and_stepped():
    wide, question = tokens(34), tokens(4, seed=2)
    document, chunks = wide[:, ::2], {"prefill_chunk_size": 2}
    row = torch.cat([document, question], 1)
    eager = tiny_model("llama", "eager")
    expected = greedy(eager, row)
    # Transformers did not always give chunks after a cache the mask of all tokens.
    chunked = greedy(eager, row, **cache_argument(cache_in(eager(document, use_cache=True))), **chunks)

    def work(ring, model):
        found = []
        for options in ({}, chunks)[: 2 if torch.equal(chunked, expected) else 1]:
            cache = ra.prefill(model, document)
            found.append(greedy(model, row, **cache_argument(cache), **options))
        return found

    for found in on_ranks(work, llama):
        assert all(torch.equal(x, expected) for x in found)


@torch.no_grad()
def test_steps_of_a_batch_are_columns_of_its_tokens():
    rows = tokens(20, batch=3)
    expected = ra.patch_model(tiny_model("llama", "eager"))(rows).logits[:, 15:]

    def work(ring, model):
        cache, logits = ra.prefill(model, rows[:, :15]), []
        for step in range(15, 20):
            positions = torch.arange(20).expand(3, -1)[:, step : step + 1]
            logits.append(
                model(rows[:, step : step + 1], position_ids=positions, **cache_argument(cache), use_cache=True).logits
            )
        return torch.cat(logits, 1)

    for logits in on_ranks(work, llama):
        assert distance(logits, expected) <= EXACT


def test_a_question_without_its_document_is_refused():
    document, question = tokens(17), tokens(4, seed=2)

    def work(ring, model):
        cache = ra.prefill(model, document)
        with pytest.raises(ValueError, match=r"the cache holds 17 tokens, .*torch\.cat\(\[document, question\], 1\)"):
            greedy(model, question, **cache_argument(cache))
        with pytest.raises(ValueError, match=r"an attention_mask has 17 \+ 4 = 21, not 4"):
            model(question, attention_mask=torch.ones_like(question), **cache_argument(cache))

    on_ranks(work, llama)


def test_a_generation_that_gives_up_its_cache_goes_on_with_whole_rows(caplog):
    document, question = tokens(15), tokens(3, seed=2)
    whole = torch.cat([document, question], 1)
    one = ra.patch_model(tiny_model("phi3", "eager", **LONGROPE))
    longer = torch.cat([tokens(25, seed=3), question], 1)
    expected = greedy(one, whole), greedy(one, longer)

    def work(ring, model):
        cache = ra.prefill(model, document)
        assert torch.equal(greedy(model, whole, **cache_argument(cache)), expected[0])
        assert cache.get_seq_length() == 20
        cache = ra.prefill(model, longer[:, :25])
        assert torch.equal(greedy(model, longer, **cache_argument(cache)), expected[1])

    on_ranks(work, lambda: tiny_model("phi3", "eager", **LONGROPE))
    assert caplog.text.count("in rows of more than 20 tokens: there generate gives up this cache of 15 tokens") == 1
