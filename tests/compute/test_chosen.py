"""Attention to chosen rows: by gathering, under masks and by Triton, as one softmax over the chosen keys."""

from unittest import mock

import pytest
import torch

from hf_ring_attention.compute import chosen
from hf_ring_attention.compute.fused import chosen as by_triton
from tests.support.fused import needs_interpreter
from tests.support.tolerance import EXACT, distance

#: Batch rows, heads, key/value heads, queries, keys, widths, chosen keys; heads and batch rows with choices of their own.
SIZES = [
    (2, 4, 2, 10, 16, 8, 6, 5, 1, 2),
    (1, 4, 4, 16, 16, 8, 8, 20, 1, 1),
    (2, 6, 2, 7, 12, 4, 4, 3, 2, 2),
    (3, 8, 1, 33, 40, 24, 16, 17, 1, 3),
    (1, 2, 2, 1, 9, 8, 8, 9, 1, 1),
]


def made(sizes, dtype, sinks):
    """Inputs, and the keys that each query has chosen; the first query has none, if there are others."""
    batch, heads, kv_heads, m, n, width, value_width, count, of_heads, of_rows = sizes
    generator = torch.Generator().manual_seed(m)
    shapes = (heads, m, width), (kv_heads, n, width), (kv_heads, n, value_width)
    inputs = [torch.randn(batch, *x, generator=generator, dtype=dtype, requires_grad=True) for x in shapes]
    if sinks:
        inputs.append(torch.randn(heads, generator=generator, dtype=dtype, requires_grad=True))
    order = torch.rand(of_rows, of_heads, m, n, generator=generator).argsort(-1)[..., :count]
    indices = order.where(torch.rand(order.shape, generator=generator) > 0.2, -1).int()
    if m > 1:
        indices[:, :, 0] = -1
    return inputs, indices


def dense(inputs, indices, scale):
    """The definition: a softmax over all keys, of which a query sees those that it has chosen."""
    (q, k, v, *sinks), n = inputs, inputs[1].shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = torch.zeros(*indices.shape[:3], n + 1, dtype=torch.bool)
    seen = seen.scatter(-1, indices.long().where(indices >= 0, n), True)[..., :n]
    seen = seen.repeat_interleave(group, 1) if indices.shape[1] > 1 else seen
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    if sinks:
        scores = torch.cat([scores, sinks[0][None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :n]
    return (weights @ v).masked_fill(~seen.any(-1, keepdim=True), 0)


def compare(sizes, sinks, gathered, dtype, bound, strided=False):
    inputs, indices = made(sizes, dtype, sinks)
    rows = [x.mT.contiguous().mT for x in inputs[:3]] if strided else inputs[:3]  # whose numbers lie apart
    way = chosen.gathering_way(*rows) if gathered else chosen.UnderMasks
    out = chosen.attend_to_chosen(*rows, indices, 0.3, *inputs[3:], way=way)
    expected = dense(inputs, indices, 0.3)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    found, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    for x, y in zip((out, *found), (expected, *wanted), strict=True):
        assert x.dtype == dtype and distance(x, y) <= bound


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_the_definition(sizes, sinks, gathered):
    for size in (1, 3000, 1 << 24):
        with mock.patch.object(chosen, "SLICE_BYTES_OF_CPUS", size):
            compare(sizes, sinks, gathered, torch.float64, EXACT)


@needs_interpreter
@pytest.mark.parametrize(("sizes", "sinks"), [(SIZES[0], True), (SIZES[1], False), (SIZES[2], True)], ids=str)
def test_triton(sizes, sinks, monkeypatch):
    inputs, calls = made(sizes, torch.float32, sinks)[0], []
    sizes_of_heads = sizes[1] // sizes[2], *sizes[5:7]
    assert by_triton.is_right(inputs[0].device, torch.float32, *sizes_of_heads)
    assert by_triton.is_right(inputs[0].device, torch.float16, *sizes_of_heads)
    monkeypatch.setattr(by_triton, "backward", lambda *x, own=by_triton.backward: calls.append(1) or own(*x))
    compare(sizes, sinks, True, torch.float32, 1e-5)
    compare(sizes, sinks, True, torch.float32, 1e-5, strided=True)
    assert calls == [1, 1]


@needs_interpreter
def test_a_wrong_kernel_is_not_used(monkeypatch, caplog):
    def wrong(*args, own=by_triton.forward):
        out, lse = own(*args)
        return out * 1.01, lse

    monkeypatch.setattr(by_triton, "forward", wrong)
    device = torch.device("cpu")
    assert not by_triton.is_right.__wrapped__(device, torch.float32, 2, 16, 8)
    assert "kernel of chosen rows is not used on cpu for torch.float32: out is" in caplog.text
    assert not by_triton.is_right.__wrapped__(device, torch.float64, 2, 16, 8)


def test_the_faster_way():
    assert chosen.gathers(128, 65536, 1) and chosen.gathers(64, 4096, 4)
    assert not chosen.gathers(2048, 65536, 1) and not chosen.gathers(2048, 4096, 4)
