"""The operations of a call on the way of the fused kernels: the host starts each of them, so their number is its time."""

import operations
import pytest
import torch
from timing import Shape
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ring_attention.compute.binding import bind_own
from hf_ring_attention.compute.cuda_kernels import CudaFlash
from hf_ring_attention.ring.engine import Execution, backward_pass, forward_pass
from hf_ring_attention.transport.transports import LocalTransport
from tests.operations import count_for_cuda
from tests.support.cases import problem_of
from tests.support.cuda_operators import WithoutDeviceGuard
from tests.support.fused import needs_triton

#: Forward and backward of a pyramid over 4096 tokens of 8 heads, with a tenth more than they are; on the busiest of 8 ranks,
#: too.
MOST = {"one device": (10, 16), "ring": (149, 361), "collective": (93, 129)}


@needs_triton
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


@pytest.mark.parametrize("pattern", ["exact", "window:512+4", "pyramid:64,3"])
def test_operations_take_tensors_of_a_gpu(pattern, checked_operators):
    """All operations of a call find their tensors on one device, in dtypes that they take; nothing is computed."""
    problem = problem_of(pattern, 2048, [[(0, 2048)]] * 2, (8, 2))
    checked = checked_operators(torch.bfloat16)
    with FakeTensorMode(), WithoutDeviceGuard(), torch.no_grad():
        q, k, v = (torch.empty(2, 2048, n, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for n in (8, 2, 2))
        transport = LocalTransport(bind_own(problem, 0, q.device, CudaFlash.joining))
        execution = Execution(transport, CudaFlash(), 0.1)
        saved = forward_pass(q, k, v, None, execution)
        *grads, _ = backward_pass(torch.empty_like(saved.out), saved, None, execution)
    assert [x.shape for x in (saved.out, *grads)] == [q.shape, q.shape, k.shape, v.shape]
    assert {x.device.type for x in (*saved, *grads)} == {"cuda"}
    assert (saved.lse.shape, saved.lse.dtype) == (q.shape[:3], torch.float32)
    assert len(checked.calls) >= 2
