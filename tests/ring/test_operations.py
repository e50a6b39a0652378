"""The operations of a call on the way of CUDA's FlashAttention-2: the host starts each of them, so their number is its time."""

import operations
from timing import Shape

from tests.operations import count_for_cuda

#: Forward and backward of a pyramid over 4096 tokens of 8 heads, with a tenth more than they are; on the busiest of 8 ranks,
#: too. An earlier version had 474 + 788, 1922 + 3458 and 972 + 1645.
MOST = {"one device": (187, 215), "ring": (520, 740), "collective": (325, 380)}


def test_calls_start_few_operations(monkeypatch):
    count_for_cuda(monkeypatch)
    found = operations.measure(Shape(8, 8, 8, "bfloat16"), 4096, ["pyramid:512,3"], 8)
    for way, most in MOST.items():
        counts = found["pyramid:512,3", way]
        assert all(count <= limit for count, limit in zip(counts, most, strict=True)), (way, counts)
        assert all(count > limit // 2 for count, limit in zip(counts, most, strict=True)), f"{way}: lower the limit"


def test_views_count():
    """Two transposes and two products; in backward four products, and two transposes."""
    counts = operations.count(Shape(2, 2, 8), 16, lambda q, k, v: q.transpose(1, 2).transpose(1, 2) * k * v)
    assert counts == (4, 6)
