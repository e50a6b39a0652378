"""Shards that say which tokens they hold: layouts are read back from them, and contradictions end all ranks."""

import re

import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from hf_ring_attention.hf.numbered_documents import layout_of_runs, numbered_runs, runs_of_layout
from hf_ring_attention.plan.balance import balanced_layout
from hf_ring_attention.training.shards import cut_batch
from tests.plan.strategies import as_tuples, drawn, random_layout
from tests.support.cases import random_documents
from tests.support.ranks import run_simulated
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, distance


def random_rows(rng):
    """A layout of any kind, and documents with padding between them."""
    batch, seq_len = rng.randint(1, 3), rng.randint(1, 30)
    documents = as_tuples(random_documents(rng, batch, seq_len), batch, seq_len)
    return random_layout(rng, seq_len, rng.randint(1, 5), batch), documents


def numbered(documents, length, first):
    """position_ids and seq_idx [B, n] of whole rows."""
    positions, numbers = torch.full((len(documents), length), 7), torch.full((len(documents), length), -1)
    for row, spans in enumerate(documents):
        for number, (start, stop) in enumerate(spans):
            positions[row, start:stop] = torch.arange(first, first + stop - start)
            numbers[row, start:stop] = number
    return positions, numbers


@settings(max_examples=300)
@given(drawn(random_rows))
def test_layouts_are_read_back(rows):
    layout, documents = rows
    for first in (0, 2):
        ranks, rows = range(layout.world_size), range(len(documents))
        positions, numbers = (
            [torch.stack([x[row, layout.positions(rank, row)] for row in rows]) for rank in ranks]
            for x in numbered(documents, layout.padded_len, first)
        )
        runs = [numbered_runs(own, None, of, first) for own, of in zip(positions, numbers)]
        assert runs == [runs_of_layout(layout, documents, rank) for rank in range(layout.world_size)]
        found, compact = layout_of_runs(runs)
        assert (found.seq_len, found.local_len) == (layout.padded_len, layout.local_len)
        for row, spans in enumerate(documents):
            lengths = [stop - start for start, stop in spans]
            assert [stop - start for start, stop in compact[row]] == lengths
            # Each token of a document has kept its rank, and its place there.
            for rank in range(layout.world_size):
                held, now = layout.positions(rank, row), found.positions(rank, row)
                for (start, stop), (new_start, _) in zip(spans, compact[row]):
                    assert [(i, t - start) for i, t in enumerate(held) if start <= t < stop] == [
                        (i, t - new_start) for i, t in enumerate(now) if new_start <= t < new_start + stop - start
                    ]


def packed_batch(lengths, length=24):
    documents = [document for row in lengths for document in row]
    ids = torch.randint(3, 90, (len(lengths), length), generator=torch.Generator().manual_seed(len(documents)))
    mask, seq_idx = torch.zeros_like(ids), torch.full_like(ids, -1)
    for row, own in enumerate(lengths):
        mask[row, : sum(own)] = 1
        seq_idx[row, : sum(own)] = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask, "seq_idx": seq_idx}


BATCH = packed_batch([[12, 2, 2, 2, 2, 2], [3, 16, 1]])


def logits_of(ring, models, batch):
    model = ra.patch_model(models[ring.rank], ring=ring).eval()
    shard = ra.shard_batch(batch, ring)
    with torch.no_grad():
        return shard, model(**{k: shard[k] for k in ("input_ids", "position_ids", "seq_idx", "attention_mask")}).logits


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("layout", ["auto", "documents"])
@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_logits_are_those_of_one_process(layout, transport):
    models = [tiny_model("llama", "ring_dilated") for _ in range(3)]

    def logits(ring):
        shard, own = logits_of(ring, models, BATCH)
        tokens = torch.stack([BATCH["input_ids"].roll(i, 1) for i in range(2)], -1)  # tell most tokens apart
        return shard["seq_idx"], shard["position_ids"], own, tokens

    found = run_simulated(logits, 2, layout=layout, transport=transport)
    [(numbers, positions, whole, _)] = run_simulated(lambda ring: logits(ring), 1)
    expected = {
        (row, int(n), int(p)): whole[row, i]
        for row in range(2) for i, (n, p) in enumerate(zip(numbers[row], positions[row])) if n >= 0
    }  # fmt: skip
    seen = 0
    for numbers, positions, own, _ in found:
        for row in range(2):
            for i, (n, p) in enumerate(zip(numbers[row].tolist(), positions[row].tolist())):
                if n >= 0:
                    assert distance(own[row, i], expected[row, n, p]) <= EXACT
                    seen += 1
    assert seen == len(expected) == 42


def test_explicit_layouts_are_kept():
    """What a user asks for is not replaced, however uneven."""
    [ring, _] = ra.simulate(2, layout="zigzag")
    assert cut_batch(BATCH, ring, "exact", None).layout.kind == "zigzag"
    [ring, _] = ra.simulate(2, layout="documents")
    assert cut_batch(BATCH, ring, "exact", None).layout.kind == "documents"
    one = {name: x[:1, :12] for name, x in BATCH.items() if name != "seq_idx"}
    shard = ra.shard_batch(one, ring, "exact")
    assert shard["seq_idx"].tolist() == [[0] * 6]


CONTRADICTIONS = {
    "each rank counts from 0": (
        lambda shard, rank: shard | {"position_ids": torch.arange(12).expand(2, -1), "seq_idx": shard["seq_idx"] * 0},
        r"the shards contradict each other: in batch row 0, the tokens of document 0 \(seq_idx\) have positions 0 to \d+, and "
        r"the next ones 0 to 11, so that tokens are missing or held twice",
    ),
    "a token is missing": (
        lambda shard, rank: shard | {"position_ids": shard["position_ids"] + (shard["position_ids"] > 3)},
        r"in batch row 0, the tokens of document 0 \(seq_idx\) have positions \d to 3, and the next ones 5 to",
    ),
    "another order": (
        lambda shard, rank: {name: x.flip(1) for name, x in shard.items()},
        r"rank 0 holds tokens of document \d \(seq_idx\) of batch row 0 out of their order: position \d+ behind position \d+",
    ),
    "no positions": (
        lambda shard, rank: {name: x for name, x in shard.items() if name != "position_ids"},
        r"position_ids are missing",
    ),
    "numbers of another shape": (
        lambda shard, rank: shard | {"seq_idx": shard["seq_idx"][:, :5]},
        r"position_ids of a shard must have the shape of its seq_idx, \(2, 5\), got \(2, 12\)",
    ),
    "numbers on one rank alone": (
        lambda shard, rank: {name: x for name, x in shard.items() if name != "seq_idx" or rank},
        r"disagree on whether seq_idx tells the layout: rank 0: False, rank 1: True",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused_on_every_rank(name):
    change, message = CONTRADICTIONS[name]
    models = [tiny_model("llama", "ring_dilated") for _ in range(2)]

    def told(ring):
        model = ra.patch_model(models[ring.rank], ring=ring).eval()
        shard = change(ra.shard_batch(BATCH, ring), ring.rank)
        with pytest.raises(ValueError, match=message):
            model(**{k: x for k, x in shard.items() if "labels" not in k})

    run_simulated(told, 2, layout="documents", transport="ring")


def test_a_layout_is_for_its_batch():
    [ring, _] = ra.simulate(2, layout="documents")
    layout = ring.layout_for(24, "exact", documents=[[(0, 20), (20, 24)], [(0, 24)]])
    with pytest.raises(
        ValueError, match=re.escape("made for the documents of 2 batch rows, which are expected along dim 0")
    ):
        ring.shard(torch.zeros(3, 24), layout)
    with pytest.raises(ValueError, match=re.escape("dim 0, got (24, 2) with tokens along dim 0")):
        ring.shard(torch.zeros(24, 2), layout, dim=0)
    with pytest.raises(ValueError, match="layout_for: documents must be a list of"):
        ring.layout_for(24, "exact", documents=[(0, 24)])
    with pytest.raises(ValueError, match="must be ascending, apart, not empty and within"):
        ring.layout_for(24, "exact", documents=[[(0, 25)]])


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_rows_come_back_whole(dim, rng):
    documents = (((0, 9), (10, 19), (19, 23)), ((1, 22),))
    layout = balanced_layout(23, 3, ra.Pattern.exact(), documents)
    shape = [2, 3, 4, 5]
    shape[dim] = 23
    whole = torch.randn(shape, dtype=torch.float64)

    def back(ring):
        own = ring.shard(whole, layout, dim).requires_grad_()
        again = ring.unshard(own, layout, dim)
        again.square().sum().backward()
        return torch.equal(again, whole), distance(own.grad, 3 * 2 * own.detach())

    assert all(same and error <= EXACT for same, error in run_simulated(back, 3))


def loaded(ring, models):
    """A batch of a loader whose ring chooses the layout, and what comes of its shards."""
    ra.patch_model(models[ring.rank], ring=ring)
    batch = packed_batch([[160, *[4] * 20]], length=240)
    [shard] = ring.prepare_data_loader(DataLoader([batch], collate_fn=lambda rows: rows[0]))
    layout = ra.layout_of_shard(shard, ring)
    whole = ring.unshard(shard["input_ids"], layout)
    with pytest.raises(
        ValueError, match="does not know the documents by which a loader of this ring has divided rows of 240"
    ):
        ring.unshard(shard["input_ids"], ring.layout_for(240, "exact"))
    return layout.kind, torch.equal(whole, batch["input_ids"])


def test_rows_of_a_loader_come_back_by_the_layout_that_they_tell():
    models = [tiny_model("llama", "ring_dilated") for _ in range(2)]
    assert run_simulated(lambda ring: loaded(ring, models), 2) == [("documents", True)] * 2


def test_shards_of_users_are_divided_as_the_ring_says():
    """Who cuts and joins rows by hand under "auto" knows nothing of documents."""
    batch = packed_batch([[160, *[4] * 20]], length=240)

    def back(ring):
        shard = ra.shard_batch(batch, ring, "exact")
        return torch.equal(ring.unshard(shard["input_ids"], ring.layout_for(240, "exact")), batch["input_ids"])

    assert run_simulated(back, 2) == [True, True]
