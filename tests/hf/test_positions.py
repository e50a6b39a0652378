"""Positions that the caller numbered: only those that go down begin a document."""

import pytest
import torch

import hf_ring_attention as ra
from tests.support.tiny_models import VOCAB, tiny_model

TOKENS = 24
#: Positions of one document with a gap (a pruned prompt, PoSE), a repeat, and both.
NUMBERED = {
    "gap": [*range(12), *range(40, 52)],
    "gap at the first token": [0, *range(30, 30 + TOKENS - 1)],
    "repeat": [*range(12), *range(11, 23)],
    "gap and repeat": [*range(8), *range(7, 15), *range(60, 68)],
}
IMPLEMENTATIONS = {
    "unpatched": lambda model_type: tiny_model(model_type, "ring_dilated"),
    "patched": lambda model_type: ra.patch_model(tiny_model(model_type, "eager")),
}


def ids():
    seed = int(torch.randint(2**31, ()))
    return torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, row, **inputs):
    return model.double()(row, use_cache=False, **inputs).logits


@pytest.mark.parametrize("masked", [True, False], ids=["mask of ones", "no mask"])
@pytest.mark.parametrize("numbered", NUMBERED)
@pytest.mark.parametrize("patched", IMPLEMENTATIONS)
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_a_gap_or_a_repeat_means_what_it_means_to_eager(model_type, patched, numbered, masked):
    """Transformers itself cuts there where a llama has no mask, and nowhere else."""
    row, inputs = ids(), {"position_ids": torch.tensor([NUMBERED[numbered]])}
    if masked:
        inputs["attention_mask"] = torch.ones(1, TOKENS, dtype=torch.int64)
    expected = logits(tiny_model(model_type, "eager"), row, **inputs)
    found = logits(IMPLEMENTATIONS[patched](model_type), row, **inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_documents_of_one_token_are_told_by_a_position_that_stands_twice():
    row, positions = ids(), torch.tensor([[0, 0, *range(9), 0, *range(12)]])
    mask, model = torch.ones_like(positions), ra.patch_model(tiny_model("llama", "eager"))
    found = logits(model, row, position_ids=positions, attention_mask=mask)
    for start, stop in ((0, 1), (1, 2), (2, 11), (11, 12), (12, 24)):
        alone = logits(model, row[:, start:stop])
        torch.testing.assert_close(found[:, start:stop], alone, rtol=1e-9, atol=1e-9 * float(alone.abs().max()))


def test_roberta_counts_documents_from_its_own_first_position():
    model, row = ra.patch_model(tiny_model("roberta", "eager")), ids()
    first = tiny_model("roberta", "eager").roberta.embeddings.padding_idx + 1
    positions = torch.tensor([[*range(first, first + 10), first, *range(first, first + 13)]])
    found = logits(model, row, position_ids=positions, attention_mask=torch.ones_like(positions))
    for start, stop in ((0, 10), (10, 11), (11, 24)):
        alone = logits(model, row[:, start:stop], position_ids=positions[:, start:stop])
        torch.testing.assert_close(found[:, start:stop], alone, rtol=1e-9, atol=1e-9 * float(alone.abs().max()))


@pytest.mark.parametrize("numbered", NUMBERED)
def test_no_label_is_lost_at_a_gap_or_a_repeat(numbered):
    row = ids()
    batch = {"input_ids": row, "labels": row, "position_ids": torch.tensor([NUMBERED[numbered]])}
    for masked in ({}, {"attention_mask": torch.ones_like(row)}):
        shard = ra.shard_batch({**batch, **masked}, ra.Ring.alone())
        assert shard["shift_labels"][0, :-1].equal(row[0, 1:]) and "seq_idx" not in shard


@pytest.mark.parametrize("numbered", NUMBERED)
def test_a_gap_or_a_repeat_is_refused_on_a_ring(numbered):
    row, positions = ids(), torch.tensor([NUMBERED[numbered]])

    def cut(ring):
        with pytest.raises(ValueError, match=r"position_ids of batch row 0 go from \d+ to \d+ at token \d+, inside"):
            ra.shard_batch({"input_ids": row, "labels": row, "position_ids": positions}, ring)
        model = ra.patch_model(tiny_model("llama", "eager"), ring=ring)
        layout = ring.layout_for(TOKENS, ra.Pattern.exact())
        with pytest.raises(ValueError, match="without a gap or a repeat"):
            model(ring.shard(row, layout), position_ids=ring.shard(positions, layout), use_cache=False)

    ra.run_simulated(cut, 2, layout="contiguous", timeout=600)
