"""What a ring keeps on devices: one binding for equal calls, bounded in bytes and in parts."""

import torch

import hf_ring_attention as ra
from hf_ring_attention.ring.bindings import Bindings


def of_size(name, numbers):
    return (name, torch.zeros(numbers, dtype=torch.int64))


def test_the_one_used_longest_ago_goes_where_they_are_too_large():
    kept = Bindings(max_bytes=64)
    first, second = kept.of(of_size, "a", 4), kept.of(of_size, "b", 4)
    assert kept.of(of_size, "a", 4) is first and kept.nbytes == 64
    kept.of(of_size, "c", 1)
    assert kept.of(of_size, "a", 4) is first
    assert kept.of(of_size, "b", 4) is not second
    assert kept.nbytes <= 64


def test_one_that_is_too_large_is_kept_until_the_next():
    kept = Bindings(max_bytes=8)
    large = kept.of(of_size, "a", 9)
    assert kept.of(of_size, "a", 9) is large and kept.nbytes == 72
    kept.of(of_size, "b", 1)
    assert kept.nbytes == 8


def test_the_one_used_longest_ago_goes_where_they_have_too_many_parts():
    kept = Bindings(max_parts=2)
    first, second = kept.of(of_size, "a", 4), kept.of(of_size, "b", 4)
    assert kept.of(of_size, "a", 4) is first
    kept.of(of_size, "c", 1)
    assert kept.of(of_size, "a", 4) is first and kept.nbytes == 40
    assert kept.of(of_size, "b", 4) is not second


def test_a_ring_counts_its_row_numbers_and_layers_share_them():
    ring = ra.Ring.alone()
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    pattern = ra.Pattern.pyramid(4, levels=2, ratio=2)
    assert ring.bindings.nbytes == 0
    ra.ring_attention(q, k, v, pattern=pattern, ring=ring)
    kept = ring.bindings.nbytes
    assert kept > 0
    ra.ring_attention(q, k, v, pattern=pattern, ring=ring)
    assert ring.bindings.nbytes == kept
