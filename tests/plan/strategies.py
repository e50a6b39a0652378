"""What hypothesis draws: problems of up to 6 ranks with any legal pattern."""

from hypothesis import strategies as st

from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.problem import Problem
from tests.support.cases import random_documents, random_pattern, random_pieces

#: A source of random numbers, which hypothesis makes simpler where a test fails.
rngs = st.randoms(use_true_random=False)


def drawn(make):
    """The strategy of a function's results from random numbers."""
    return st.builds(make, rngs)


def as_tuples(documents, batch, seq_len):
    if documents is None:
        return (((0, seq_len),),) * batch
    return tuple(tuple(map(tuple, row)) for row in documents)


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
    return Problem(
        rng.choice([random_pattern(rng), Pattern((*sinks, near))]),
        random_layout(rng, seq_len, rng.randint(1, 6), batch),
        as_tuples(random_documents(rng, batch, seq_len), batch, seq_len),
        num_heads=num_kv_heads * rng.randint(1, 3),
        num_kv_heads=num_kv_heads,
        causal=rng.random() < 0.6,
    )


problems = drawn(random_problem)
