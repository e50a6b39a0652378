"""A forward pass that is refused on one rank ends on all of them, of 2 processes, and the next pass is right."""

import copy
import time

import pytest
import torch.distributed as dist

import hf_ring_attention as ra
from tests.support.neighbours import llama, logits_of
from tests.support.probe import batch, distance
from tests.support.ranks import PROMPTLY
from tests.support.tolerance import EXACT

#: What the error of a forward pass must say.
REFUSALS = {
    "rank 1 trains": r"disagree on whether the model trains: rank 0: False, rank 1: True",
    "dropout in rank 1's layers": r"LlamaAttention: attention dropout 0\.1 was asked for.*model\.eval\(\)",
    "a mask with a hole": r"batch row 1 of the attention mask has padding inside a document.*takes padding before and after",
}


def refused(rank, name, layout):
    """The seconds until a pass was refused, and the error of a correct one after it."""
    model, (inputs, labels) = ra.patch_model(llama(), ring=ra.Ring(layout=layout)), batch("right")
    wrong = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    if name == "a mask with a hole":
        wrong["attention_mask"][1, 9] = 0
    model.train(name == "rank 1 trains" and rank == 1)
    for layer in model.model.layers:
        layer.self_attn.train(name == "dropout in rank 1's layers" and rank == 1)
        layer.self_attn.attention_dropout = 0.1
    start = time.perf_counter()
    with pytest.raises(ValueError, match=REFUSALS[name]):
        model(**wrong, use_cache=False)
    seconds = time.perf_counter() - start
    dist.barrier()
    # Also of a copy: a process group in its modules must not stand in its way.
    found = logits_of(copy.deepcopy(model).eval(), inputs, labels)
    return seconds, distance(found, logits_of(ra.patch_model(llama()), inputs, labels))


@pytest.mark.parametrize(("name", "layout"), [*zip(REFUSALS, ("contiguous", "zigzag", "contiguous"))])
def test_refused_on_every_rank_and_the_next_pass_is_right(ranks, name, layout):
    for seconds, error in ranks.run(refused, 2, name, layout):
        assert seconds < PROMPTLY
        assert error <= EXACT
