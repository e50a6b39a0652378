"""What hypothesis draws: problems of up to 6 ranks with any legal pattern; and the pairs of a plan's tiles."""

import itertools

from hypothesis import strategies as st

from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from tests.support.cases import problem_of, random_documents, random_pattern, random_pieces

#: A source of random numbers, which hypothesis makes simpler if a test fails.
rngs = st.randoms(use_true_random=False)


def random_layout(rng, seq_len, world_size, batch):
    kind = rng.choice(["contiguous", "zigzag", "documents"])
    if kind == "documents":
        return random_pieces(rng, seq_len, world_size, batch)
    return SequenceLayout(kind, seq_len, world_size)


def random_problem(rng):
    """Any pattern, and as often one that reaches near, which sends both ways."""
    batch, seq_len, num_kv_heads = rng.randint(1, 3), rng.randint(1, 30), rng.randint(1, 3)
    near = rng.choice([Window(rng.randint(1, 5)), Segment(rng.randint(1, 9))])
    sinks = rng.choice([(), (Sink(1),)])
    return problem_of(
        rng.choice([random_pattern(rng), Pattern((*sinks, near))]),
        random_layout(rng, seq_len, rng.randint(1, 6), batch),
        random_documents(rng, batch, seq_len) or [[(0, seq_len)]] * batch,
        heads=(num_kv_heads * rng.randint(1, 3), num_kv_heads),
        causal=rng.random() < 0.6,
    )


problems = st.builds(random_problem, rngs)


def query_rows(batch, group):
    """(batch row, query head, query row, its key rows) of a batch of tiles, by the words of `TileBatch`."""
    nq, nk = batch.num_queries, batch.num_keys
    for item in batch.items:
        for batch_row, number, copy in itertools.product(item.batch_rows, item.heads, range(item.copies)):
            heads = range(number * group, (number + 1) * group)
            for head, i, fold in itertools.product(heads, range(nq), range(batch.fold_size)):
                seen = {"full": range(nk), "causal": range(i + 1), "band": range(i, i + nk - nq + 1)}[batch.shape]
                row = item.query_row + copy + fold + i * batch.query_stride
                yield batch_row, head, row, [item.key_row + j * batch.key_stride for j in seen]
