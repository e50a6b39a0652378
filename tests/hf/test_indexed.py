"""Layers that choose their keys: as each document alone in Transformers, whatever the row, the slices and the ranks."""

import contextlib
import random
from unittest import mock

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute import chosen
from hf_ring_attention.hf.layer import indexed
from hf_ring_attention.hf.model.types import INDEXED

from ..support.probe import BOUNDS, alone, errors, logits_and_gradients, over_ring
from ..support.ranks import on_ranks
from ..support.tiny_models import CAUSAL_TYPES, VOCAB, tiny_config, tiny_model

TYPES = [name for name in INDEXED if name in CAUSAL_TYPES]
#: Their softmax and RoPE are float32, also in models of float64.
BOUND = BOUNDS[torch.float32]


def changes_of(model_type, rng):
    """Few keys to choose, fewer and more than documents have; shared choices; and heads that share keys."""
    if model_type == "minimax_m3_vl_text":
        return {"index_topk_blocks": rng.choice([1, 2, 3, 9]), "index_block_size": rng.choice([1, 2, 5])}
    changes = {"index_topk": rng.choice([1, 3, 8, 40])}
    if model_type in ("glm_moe_dsa", "hy_v4"):
        layers = tiny_config(model_type).num_hidden_layers
        changes["indexer_types"] = ["full", *rng.choices(["full", "shared"], k=layers - 1)]
    return changes


def random_rows(rng):
    """Inputs and labels of documents: padded, or packed with padding around them."""
    length, rows = rng.randint(2, 30), rng.randint(1, 3)
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    mask = torch.ones_like(ids)
    packed = rng.random() < 0.5
    for row in range(rows):
        ends = sorted(rng.sample(range(length + 1), min(length + 1, rng.randint(2, 5) if packed else 2)))
        mask[row] = 0
        for number, (start, stop) in enumerate(zip(ends, ends[1:]), 1):
            mask[row, start:stop] = number
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


@contextlib.contextmanager
def slices_of(rng):
    """Slices of few queries, and either way to attend."""
    size, cost = rng.choice([1, 500, 4000, 1 << 26]), rng.choice([0, 32, 1 << 20])
    few = mock.patch.object(indexed, "SLICE_BYTES", size), mock.patch.object(chosen, "SLICE_BYTES_OF_CPUS", size)
    with few[0], few[1], mock.patch.object(chosen, "GATHERED_COST", cost):
        yield


def compare(seed):
    """A random case against each document alone, by Transformers' own attention."""
    rng = random.Random(seed)
    model_type = rng.choice(TYPES)
    changes, (inputs, labels) = changes_of(model_type, rng), random_rows(rng)
    eager = tiny_model(model_type, "eager", **changes)
    expected = alone(eager, {**inputs, "position_ids": positions_of(inputs)}, labels)
    ranks = rng.choice([1, 1, 2, 3, 4])
    settings = {
        "layout": rng.choice(["zigzag", "contiguous", "documents"]),
        "transport": rng.choice(["ring", "collective"]),
    }
    with slices_of(rng):
        if ranks == 1:
            found = [logits_and_gradients(ra.patch_model(tiny_model(model_type, "eager", **changes)), inputs, labels)]
        else:
            make = lambda: tiny_model(model_type, "eager", **changes)  # noqa: E731
            found = on_ranks(lambda ring, model: over_ring(model, ring, inputs, labels), make, ranks, **settings)
    for answer in found:
        assert max(errors(answer, expected)) <= BOUND, (seed, model_type, changes, settings, ranks)


def positions_of(inputs):
    """Positions that count each document."""
    mask = inputs["attention_mask"]
    positions = torch.zeros_like(mask)
    for row, numbers in enumerate(mask):
        for number in numbers.unique():
            at = (numbers == number).nonzero()[:, 0]
            positions[row, at] = torch.arange(len(at))
    return positions


@pytest.mark.parametrize("seeds", [range(40)])
def test_random_rows(seeds):
    for seed in seeds:
        compare(seed)


@pytest.mark.slow
def test_500_random_rows():
    for seed in range(1000, 1500):
        compare(seed)
