"""Positions that the caller numbered: only those that go down begin a document."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import models_of, runner_of
from hf_ring_attention.hf.rows.documents import first_position, rows_of_call
from tests.hf.alike import assert_alike, assert_on_ranks, logits, refused
from tests.support.ranks import on_ranks
from tests.support.tiny_models import POSITIONS, VOCAB, tiny_model

TOKENS = 24
#: Positions of one document with a gap (a pruned prompt, PoSE), a repeat, and both.
NUMBERED = {
    "gap": [*range(12), *range(40, 52)],
    "gap at the first token": [0, *range(30, 30 + TOKENS - 1)],
    "repeat": [*range(12), *range(11, 23)],
    "gap and repeat": [*range(8), *range(7, 15), *range(60, 68)],
}


def ids():
    seed = int(torch.randint(2**31, ()))
    return torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def llama():
    return tiny_model("llama", "eager")


@pytest.mark.drawn
@pytest.mark.parametrize("numbered", NUMBERED)
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_a_gap_or_a_repeat_without_a_mask_means_what_it_means_to_eager(model_type, numbered):
    """Transformers itself cuts there only if a llama gets no mask; random rows have one."""
    row, inputs = ids(), {"position_ids": torch.tensor([NUMBERED[numbered]])}
    expected = logits(tiny_model(model_type, "eager"), row, **inputs)
    for model in (tiny_model(model_type, "ring_dilated"), ra.patch_model(tiny_model(model_type, "eager"))):
        assert_alike(logits(model, row, **inputs), expected)


def test_documents_of_one_token_are_told_by_a_position_that_stands_twice():
    row, positions = ids(), torch.tensor([[0, 0, *range(9), 0, *range(12)]])
    told, model = {"position_ids": positions, "attention_mask": torch.ones_like(positions)}, ra.patch_model(llama())
    spans = ((0, 1), (1, 2), (2, 11), (11, 12), (12, 24))
    alone = torch.cat([logits(model, row[:, start:stop]) for start, stop in spans], 1)
    for ranks in (1, 2):
        assert_on_ranks(lambda ring, model: logits(model, row, **told), llama, alone, ranks)


@pytest.mark.parametrize("numbered", ["gap", "gap and repeat"])
def test_a_gap_or_a_repeat_on_a_ring(numbered):
    """Under a mask it means the same; without one, whether a document begins depends on the model."""
    row, inputs = ids(), {"position_ids": torch.tensor([NUMBERED[numbered]])}
    said = r"position_ids of row 0 go from \d+ to \d+ at token \d+: pass an attention"
    on_ranks(lambda ring, model: refused(said, logits, model, row, **inputs), llama)


def test_sound_between_frames_begins_no_document():
    """Its positions go back to the frames before it, in time, height and width."""
    times = torch.tensor([0, 1, 2, 2, 27, 27, *range(2, 27), 0, 1])
    rows = torch.stack([times, times + (times == 27), times]).expand(2, 3, -1).movedim(0, 1)

    def documents(positions, mask=None):
        arguments = {"position_ids": positions, "attention_mask": mask}
        return rows_of_call(torch.nn.Module(), torch.zeros(2, positions.shape[-1]), arguments).documents

    assert documents(rows) == (((0, 31), (31, 33)),) * 2
    assert documents(rows[:, :1, :31]) is None
    mask = torch.ones(2, 33).long()
    mask[1, :2] = mask[0, -2:] = 0
    assert documents(rows, mask) == (((0, 31),), ((2, 31), (31, 33)))


DOCUMENTS = ((0, 10), (10, 11), (11, 24))
#: How collators mark documents without positions.
TOLD = {
    "seq_idx": {"seq_idx": torch.tensor([[0] * 10 + [1] + [2] * 13])},
    "cu_seq_lens": {"cu_seq_lens_q": torch.tensor([0, 10, 11, 24])},
}


COUNTED = {"position_ids": torch.cat([torch.arange(stop - start) for start, stop in DOCUMENTS])[None]}
ONE = {
    "seq_idx": {"seq_idx": torch.zeros(1, TOKENS).long()},
    "cu_seq_lens": {"cu_seq_lens_q": torch.tensor([0, TOKENS])},
}


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize(
    ("model_type", "told_of", "inputs", "said", "ranks"),
    [
        ("bart", TOLD, {}, r"was given packed rows, and takes no position_ids", (1,)),
        (
            "llama", TOLD, {"position_ids": torch.arange(TOKENS)[None]},
            r"of row 0 go from 9 to 10 at token 10, where a document begins: pass", (1,),
        ),
        (
            "roberta", TOLD, COUNTED,
            r"of row 0 go from 0 to 0 at token 0, where a document begins: .* count each document from 1", (1,),
        ),
        ("llama", ONE, COUNTED, r"of row 0 go from 9 to 0 at token 10, where no document begins: pass", (1, 2)),
    ],
    ids=["not numbered by the caller", "no document begins", "begins elsewhere", "others begin"],
)  # fmt: skip
def test_positions_that_contradict_the_documents_are_refused(told, model_type, told_of, inputs, said, ranks):
    """Also if the model numbers tokens itself."""
    for count in ranks:
        on_ranks(
            lambda ring, model: refused(said, logits, model, ids(), **inputs, **told_of[told]),
            lambda: tiny_model(model_type, "eager"),
            count,
        )


def test_padding_of_a_collator_is_in_no_document():
    """Its positions may go back, with a mask that knows the padding, and without one."""
    row, lengths = ids(), (8, 1, 11)
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(4).long()])[None]
    packed = {"position_ids": positions, "seq_idx": torch.tensor([[0] * 8 + [1] + [2] * 11 + [-1] * 4])}
    model, mask = ra.patch_model(llama()), (packed["seq_idx"] >= 0).long()
    alone = torch.cat([logits(model, x) for x in row[:, :20].split(lengths, 1)], 1)

    def work(ring, model):
        return [logits(model, row, **inputs)[:, :20] for inputs in (packed, {**packed, "attention_mask": mask})]

    for ranks in (1, 2):
        assert_on_ranks(work, llama, [alone, alone], ranks)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_models_that_make_masks_around_their_text_model(model_type):
    row, model = ids(), ra.patch_model(tiny_model(model_type, "eager"))
    alone = torch.cat([logits(model, row[:, start:stop]) for start, stop in DOCUMENTS], 1)
    for inputs in ({}, {"attention_mask": torch.ones_like(row)}, TOLD["seq_idx"]):
        assert_alike(logits(model, row, **COUNTED, **inputs), alone)
    # Padding does not become a document because its positions go down.
    mask = torch.ones_like(row)
    mask[:, 20:] = 0
    padded = {"attention_mask": mask, "position_ids": torch.arange(TOKENS)[None].masked_fill(mask == 0, 1)}
    eager = tiny_model(model_type, "eager")
    assert_alike(*(logits(each, row, **padded)[:, :20] for each in (model, eager)))


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "roberta"])
def test_a_row_beyond_the_table_of_positions_is_refused_on_every_rank(model_type):
    """Only the last rank would look its positions up in vain, and the others would wait."""
    row = torch.randint(3, VOCAB, (1, POSITIONS + 2))

    def work(ring, model):
        logits(model, row[:, : POSITIONS - 2 * first_position(runner_of(model))])
        refused(r"has learned positions for \d+ tokens, and a row has a token at", logits, model, row)

    on_ranks(work, lambda: tiny_model(model_type, "eager"), 2, layout="contiguous")


def test_a_model_is_divided_by_the_ring_it_was_patched_with_last():
    model, rings = tiny_model("llama", "eager"), [ra.Ring.alone() for _ in range(2)]
    for ring in rings:
        ra.patch_model(model, ring=ring)
        assert [models_of(other) for other in rings] == [[model] if other is ring else [] for other in rings]
    ra.patch_model(model)
    assert [models_of(ring) for ring in rings] == [[], []]
