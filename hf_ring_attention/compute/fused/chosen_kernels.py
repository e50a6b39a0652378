"""The Triton kernels of attention to chosen rows: a program has a query of all heads that share its keys, and reads only these.

Gradients of keys and values are added up by atomic operations, in any order.
"""

import triton
import triton.language as tl

from .kernels import ANY_LENGTH, LOG2, NONE, load_rows

#: The numbers of tokens and of chosen keys, which must not make Triton compile again.
ANY_CHOICE = (*ANY_LENGTH, "chosen", "sib", "sih", "sin")


@triton.jit(do_not_specialize=ANY_CHOICE)
def chosen_forward_kernel(
    Q, K, V, INDEX, OUT, LSE, scale, chosen,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sib, sih, sin, sob, soh, son, slb, slh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes out and lse of a query's heads; 0 and -inf without any key."""
    x = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    hk = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    group = tl.arange(0, ROWS)
    exists = group < GROUP
    head = hk * GROUP + group
    q = load_rows(Q + b * sqb + x * sqn, head, sqh, exists, D, BLOCK_D, True)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    most = tl.full([ROWS], NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, chosen, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        rows = tl.load(INDEX + b * sib + hk * sih + x * sin + j, mask=j < chosen, other=-1).to(tl.int64)
        k = load_rows(K + b * skb + hk * skh, rows, skn, rows >= 0, D, BLOCK_D, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale / LOG2)
        s = tl.where((rows >= 0)[None, :], s, NONE)
        top = tl.maximum(most, tl.max(s, 1))
        base = tl.where(top == NONE, 0.0, top)
        p = tl.exp2(s - base[:, None])
        factor = tl.exp2(most - base)
        total = total * factor + tl.sum(p, 1)
        v = load_rows(V + b * svb + hk * svh, rows, svn, rows >= 0, DV, BLOCK_DV, True)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
        most = top
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    d = tl.arange(0, BLOCK_DV)
    outs = OUT + b * sob + x * son + head[:, None] * soh + d[None, :]
    tl.store(outs, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=exists[:, None] & (d < DV)[None, :])
    tl.store(LSE + b * slb + head * slh + x, tl.where(none, NONE, (most + tl.log2(total)) * LOG2), mask=exists)


@triton.jit(do_not_specialize=ANY_CHOICE)
def chosen_backward_kernel(
    Q, K, V, INDEX, DOUT, LSE, DELTA, DQ, DK, DV_, scale, chosen,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sib, sih, sin, sob, soh, son, slb, slh, sgb, sgh, sgn, skr, svr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes dq of a query's heads, and adds to dk and dv, which are float32 and contiguous."""
    x = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    hk = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    group = tl.arange(0, ROWS)
    exists = group < GROUP
    head = hk * GROUP + group
    q = load_rows(Q + b * sqb + x * sqn, head, sqh, exists, D, BLOCK_D, True)
    dout = load_rows(DOUT + b * sob + x * son, head, soh, exists, DV, BLOCK_DV, True)
    at = b * slb + head * slh + x
    lse = tl.load(LSE + at, mask=exists, other=0.0)
    lse = tl.where(lse == NONE, 0.0, lse) / LOG2
    delta = tl.load(DELTA + at, mask=exists, other=0.0)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    for first in range(0, chosen, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        rows = tl.load(INDEX + b * sib + hk * sih + x * sin + j, mask=j < chosen, other=-1).to(tl.int64)
        seen = rows >= 0
        k = load_rows(K + b * skb + hk * skh, rows, skn, seen, D, BLOCK_D, True)
        v = load_rows(V + b * svb + hk * svh, rows, svn, seen, DV, BLOCK_DV, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale / LOG2)
        p = tl.where(seen[None, :] & exists[:, None], tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None]) * scale).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
        dv = tl.dot(tl.trans(p.to(v.dtype)), dout, input_precision="ieee")
        of_head = (b * KV_HEADS + hk).to(tl.int64)
        tl.atomic_add(DK + of_head * skr + rows[:, None] * D + d[None, :], dk, mask=seen[:, None] & (d < D)[None, :])
        tl.atomic_add(DV_ + of_head * svr + rows[:, None] * DV + e[None, :], dv, mask=seen[:, None] & (e < DV)[None, :])
    dqs = DQ + b * sgb + x * sgn + head[:, None] * sgh + d[None, :]
    tl.store(dqs, dq.to(DQ.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])
