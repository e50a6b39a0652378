"""The Triton kernels of backward: dq of query items, and dk and dv of key items (`lists.py` has the integers)."""

import triton
import triton.language as tl

from .kernels import ANY_LENGTH, BEYOND, FEW, LOG2, NONE, load_rows, log2_scores, query_rows, stretches, visible_keys


@triton.jit
def _dq_of_keys(
    acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, start, stop, end, left, right, inner, outer,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, MASK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the keys [start, stop) of a tile to dq; MASK as for forward."""
    k0 = tl.load(tile + 4)
    ks = tl.load(tile + 5)
    for j0 in tl.range(start, stop, BLOCK_N, num_stages=None if STAGED else 1):
        j = j0 + tl.arange(0, BLOCK_N)
        rows = (k0 + j * ks).to(tl.int64)
        k = load_rows(k_base, rows, skn, j < end, D, BLOCK_D, MASK != "none")
        v = load_rows(v_base, rows, svn, j < end, DV, BLOCK_DV, MASK != "none")
        s, tanh = log2_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, outer, CAPPED)
        if MASK == "edges":
            if (j0 < left) | (j0 >= right):
                s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, NONE)
        elif MASK == "all":
            s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, NONE)
        ds = tl.exp2(s - lse[:, None]) * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        if CAPPED:
            ds = ds * (1 - tanh * tanh)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=ANY_LENGTH)
def dq_kernel(
    Q, K, V, OUT, DO, LSE, DELTA, DQ, ITEMS, REFERENCES, TILES, inner, outer, scale,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sdb, sdh, sdn, slb, slh, sgb, sgh, sgn,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, RESUME: tl.constexpr,
    LOOPS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Writes dq of an item, and DELTA, the row sums of dout * out. With RESUME, dq is added to DQ, which is float32."""
    item = ITEMS + tl.program_id(0).to(tl.int64) * 8
    x, head, exists = query_rows(item, BLOCK_M, HEADS)
    b = tl.load(item + 3).to(tl.int64)
    hk = tl.load(item + 5).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    xl = x.to(tl.int64)
    do = load_rows(DO + b * sdb, head * sdh + xl * sdn, 1, exists, DV, BLOCK_DV, True)
    out = load_rows(OUT + b * sob, head * soh + xl * son, 1, exists, DV, BLOCK_DV, True)
    of_row = b * slb + head * slh + xl
    lse = tl.load(LSE + of_row, mask=exists, other=NONE) / LOG2
    # Rows without a key may have any numbers in dout.
    do = tl.where((lse == NONE)[:, None], 0.0, do).to(do.dtype)
    lse = tl.where(lse == NONE, float("inf"), lse)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + of_row, delta, mask=exists)
    q = load_rows(Q + b * sqb, head * sqh + xl * sqn, 1, exists, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_base = K + b * skb + hk * skh
    v_base = V + b * svb + hk * svh
    for reference in range(tl.load(item + 6), tl.load(item + 7)):
        tile = TILES + tl.load(REFERENCES + reference) * 12
        low, high, inside = visible_keys(tile, x, exists)
        start, left, right, stop = stretches(low, high, inside, exists, BLOCK_N)
        if SMALL and tl.load(tile + 10) <= FEW:
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, 0, stop, stop, left, right, inner, outer,
                FEW, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", False,
            )  # fmt: skip
        elif LOOPS == "one" or LOOPS == "edges":
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, start, stop, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "edges" if LOOPS == "edges" else "all", True,
            )  # fmt: skip
        else:
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, start, left, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", LOOPS == "staged",
            )  # fmt: skip
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, left, right, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "none", True,
            )  # fmt: skip
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, right, stop, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", LOOPS == "staged",
            )  # fmt: skip
    acc = acc * scale
    x, head, exists = query_rows(item, BLOCK_M, HEADS, True)
    at = DQ + b * sgb + (head * sgh + x.to(tl.int64) * sgn)[:, None] + d[None, :]
    mask = exists[:, None] & (d < D)[None, :]
    if RESUME:
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(at, acc.to(DQ.dtype.element_ty), mask=mask)


@triton.jit
def _whole_rows(begin, end, n0, count, tile, R: tl.constexpr):
    """Returns the part of a key item's rows [begin, end), in blocks of R, where each row sees all of its keys."""
    fold = tl.load(tile + 2).to(tl.int64)
    lo0 = tl.load(tile + 6)
    hi0 = tl.load(tile + 8)
    last = n0 + count
    # The first query number that sees the last key, and the end of those that see the first one.
    first = tl.where(tl.load(tile + 9) > 0, last - hi0, tl.where(hi0 >= last, 0, BEYOND))
    stop = tl.where(tl.load(tile + 7) > 0, n0 - lo0 + 1, tl.where(lo0 <= n0, BEYOND, 0))
    left = tl.minimum(tl.maximum(first * fold, begin), end)
    left = begin + (left - begin + R - 1) // R * R
    right = tl.minimum(stop * fold, end)
    right = tl.where(left + R <= right, left + (right - left) // R * R, begin)
    return tl.where(right > begin, left, begin).to(tl.int32), right.to(tl.int32)


@triton.jit
def _add_rows(
    dk, dv, k, v, n, Q, DO, LSE, DELTA, tile, head, begin, stop, end, left, right, inner, outer,
    sqh, sqn, sdh, sdn, slh, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the rows [begin, stop) of a tile to dk and dv of the keys n; MASK as for forward."""
    q0 = tl.load(tile)
    qs = tl.load(tile + 1)
    fold = tl.load(tile + 2)
    lo0 = tl.load(tile + 6)
    ls = tl.load(tile + 7)
    hi0 = tl.load(tile + 8)
    hs = tl.load(tile + 9)
    number = tl.arange(0, BLOCK_M)
    for r0 in tl.range(begin, stop, BLOCK_M // HEADS, num_stages=None if STAGED else 1):
        r = r0 + number // HEADS
        exists = (r < end) & (number // HEADS < BLOCK_M // HEADS)
        i = r // fold
        x = (q0 + i * qs + r - i * fold).to(tl.int64)
        q = load_rows(Q, head * sqh + x * sqn, 1, exists, D, BLOCK_D, MASK != "none")
        do = load_rows(DO, head * sdh + x * sdn, 1, exists, DV, BLOCK_DV, MASK != "none")
        of_row = head * slh + x
        if MASK != "none":
            lse = tl.load(LSE + of_row, mask=exists, other=float("inf")) / LOG2
            delta = tl.load(DELTA + of_row, mask=exists, other=0.0)
        else:
            lse = tl.load(LSE + of_row) / LOG2
            delta = tl.load(DELTA + of_row)
        s, tanh = log2_scores(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, outer, CAPPED)
        p = tl.exp2(s - lse[None, :])
        if MASK == "edges":
            if (r0 < left) | (r0 >= right):
                seen = (
                    (n[:, None] >= (lo0 + ls * i)[None, :]) & (n[:, None] < (hi0 + hs * i)[None, :]) & exists[None, :]
                )
                p = tl.where(seen, p, 0.0)
        elif MASK == "all":
            seen = (n[:, None] >= (lo0 + ls * i)[None, :]) & (n[:, None] < (hi0 + hs * i)[None, :]) & exists[None, :]
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        if CAPPED:
            ds = ds * (1 - tanh * tanh)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=ANY_LENGTH)
def dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV_, PARTS, ITEMS, TILES, inner, outer, scale,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, slb, slh, sgb, sgh, sgn, swb, swh, swn,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, ADD: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a key item.

    With ADD, they are added to float32 tensors, by an atomic operation for each number. Without, this program writes the rows
    that no other one writes, and puts others' rows into PARTS [slots, D + DV], float32, for `sum_kernel`.
    """
    item = ITEMS + tl.program_id(0).to(tl.int64) * 9
    tile = TILES + tl.load(item) * 12
    n0 = tl.load(item + 1)
    count = tl.load(item + 2)
    n = n0 + tl.arange(0, BLOCK_N)
    exist = tl.arange(0, BLOCK_N) < count
    b = tl.load(item + 3).to(tl.int64)
    hk = tl.load(item + 5).to(tl.int64)
    head = tl.load(item + 4).to(tl.int64) + tl.arange(0, BLOCK_M) % HEADS
    rows = (tl.load(tile + 4) + n * tl.load(tile + 5)).to(tl.int64)
    k = load_rows(K + b * skb + hk * skh, rows, skn, exist, D, BLOCK_D, True)
    v = load_rows(V + b * svb + hk * svh, rows, svn, exist, DV, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    begin = tl.load(item + 6)
    end = tl.load(item + 7)
    q_base = Q + b * sqb
    do_base = DO + b * sdb
    lse_base = LSE + b * slb
    delta_base = DELTA + b * slb
    left, right = _whole_rows(begin, end, n0, count, tile, BLOCK_M // HEADS)
    # Other heads than a divisor of the block's rows leave rows to mask in each block.
    if LOOPS == "one" or BLOCK_M % HEADS != 0:
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, begin, end, end, left, right, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", True,
        )  # fmt: skip
    elif LOOPS == "edges":
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, begin, end, end, left, right, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "edges", True,
        )  # fmt: skip
    else:
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, begin, left, end, left, right, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", LOOPS == "staged",
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, left, right, end, left, right, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "none", True,
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, right, end, end, left, right, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", LOOPS == "staged",
        )  # fmt: skip
    dk = dk * scale
    # Loaded again, these take no registers before.
    exist = tl.arange(0, BLOCK_N) < tl.load(item + 2, volatile=True)
    n = tl.load(item + 1, volatile=True) + tl.arange(0, BLOCK_N)
    rows = (tl.load(tile + 4, volatile=True) + n * tl.load(tile + 5, volatile=True)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dw = tl.arange(0, BLOCK_DV)
    of_k = exist[:, None] & (d < D)[None, :]
    of_v = exist[:, None] & (dw < DV)[None, :]
    k_at = DK + b * sgb + hk * sgh + rows[:, None] * sgn + d[None, :]
    v_at = DV_ + b * swb + hk * swh + rows[:, None] * swn + dw[None, :]
    if ADD:
        tl.atomic_add(k_at, dk, mask=of_k, sem="relaxed")
        tl.atomic_add(v_at, dv, mask=of_v, sem="relaxed")
    else:
        slot = tl.load(item + 8)
        if slot < 0:
            tl.store(k_at, dk.to(DK.dtype.element_ty), mask=of_k)
            tl.store(v_at, dv.to(DV_.dtype.element_ty), mask=of_v)
        else:
            part = PARTS + (slot.to(tl.int64) + tl.arange(0, BLOCK_N))[:, None] * (D + DV)
            tl.store(part + d[None, :], dk, mask=of_k)
            tl.store(part + D + dw[None, :], dv, mask=of_v)


@triton.jit
def sum_kernel(
    PARTS, DK, DV_, ITEMS, SLOTS, sgb, sgh, sgn, swb, swh, swn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of a key row: the sum of some slots of PARTS. An item is b, hk, row, first slot, references to slots."""
    item = ITEMS + tl.program_id(0).to(tl.int64) * 6
    b = tl.load(item).to(tl.int64)
    hk = tl.load(item + 1).to(tl.int64)
    row = tl.load(item + 2).to(tl.int64)
    first = tl.load(item + 3).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dw = tl.arange(0, BLOCK_DV)
    dk = tl.zeros([BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_DV], tl.float32)
    for reference in range(tl.load(item + 4), tl.load(item + 5)):
        part = PARTS + (first + tl.load(SLOTS + reference)) * (D + DV)
        dk += tl.load(part + d, mask=d < D, other=0.0)
        dv += tl.load(part + D + dw, mask=dw < DV, other=0.0)
    tl.store(DK + b * sgb + hk * sgh + row * sgn + d, dk.to(DK.dtype.element_ty), mask=d < D)
    tl.store(DV_ + b * swb + hk * swh + row * swn + dw, dv.to(DV_.dtype.element_ty), mask=dw < DV)
