"""The Triton kernels: attention of all tiles of a step in one launch, forward and backward (`lists.py` has the integers).

A program keeps the softmax of its query rows in registers over all their tiles (FlashAttention, arXiv 2205.14135; online
softmax, arXiv 1805.02867). Nothing is gathered, and no partial result goes through memory within a launch. With RESUME, a
program begins with the results of earlier launches: these merge steps of a ring, and rows of dilated queries.

Scores are in units of log(2): s = inner * q.k, or s = outer * tanh(inner * q.k) if they are capped. All sums are float32.

LOOPS names the loops over a tile: "one" masks every block; "split" has separate loops for blocks that need a mask and for those
that need none; "staged" is "split" with buffers for masked blocks too (`num_stages`). With SMALL, tiles of at most 16 keys, as
sinks are, take blocks of 16 keys.
"""

import triton
import triton.language as tl

from .lists import FEW_KEYS

_LOG2 = tl.constexpr(0.6931471805599453)
_NONE = tl.constexpr(float("-inf"))
_FAR = tl.constexpr(2147483647)
_FEW = tl.constexpr(FEW_KEYS)
#: The distances of log-sum-exps change with the number of tokens: Triton must not compile again if 16 divides them.
_ANY_LENGTH = ("slb", "slh")


@triton.jit
def _log2_scores(products, inner, outer, CAPPED: tl.constexpr):
    """Returns scores, and the tanh of capped ones."""
    if CAPPED:
        tanh = 1 - 2 / (tl.exp2(products * (inner * 2.8853900817779268)) + 1)
        return tanh * outer, tanh
    else:
        return products * inner, products


@triton.jit
def _query_rows(item, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, AGAIN: tl.constexpr = False):
    """Returns the query rows of an item, their heads, and which of them exist.

    Loaded AGAIN for the results, they take no registers between.
    """
    first = tl.load(item, volatile=AGAIN)
    step = tl.load(item + 1, volatile=AGAIN)
    count = tl.load(item + 2, volatile=AGAIN)
    number = tl.arange(0, BLOCK_M)
    row = number // HEADS
    head = tl.load(item + 4, volatile=AGAIN).to(tl.int64) + number % HEADS
    return first + step * row, head, (row < count) & (row < BLOCK_M // HEADS)


@triton.jit
def _visible_keys(tile, x, exists):
    """Returns the key numbers [low, high) that each query row sees; an empty range for rows outside of the tile."""
    q0 = tl.load(tile)
    qs = tl.load(tile + 1)
    fold = tl.load(tile + 2)
    nq = tl.load(tile + 3)
    rel = x - q0
    i = rel // qs
    inside = exists & (rel >= 0) & (i < nq) & (rel - i * qs < fold)
    low = tl.maximum(tl.load(tile + 6) + tl.load(tile + 7) * i, 0)
    high = tl.minimum(tl.load(tile + 8) + tl.load(tile + 9) * i, tl.load(tile + 10))
    inside = inside & (low < high)
    return tl.where(inside, low, _FAR), tl.where(inside, high, 0), inside


@triton.jit
def _stretches(low, high, inside, exists, BLOCK_N: tl.constexpr):
    """Returns where the keys of a block of rows start and stop, and the part where no block of keys needs a mask."""
    stop = tl.max(high, 0)
    start = tl.minimum(tl.min(low, 0), stop)
    # The keys that all rows see, if all rows are in the tile.
    inner = tl.max(tl.where(inside, low, start), 0)
    outer = tl.min(tl.where(inside, high, stop), 0)
    outer = tl.where(tl.max(tl.where(exists & (inside == 0), 1, 0), 0) > 0, start, outer)
    left = start + (inner - start + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    whole = left + BLOCK_N <= outer
    right = tl.where(whole, left + (outer - left) // BLOCK_N * BLOCK_N, start)
    return start, tl.where(whole, left, start), right, stop


@triton.jit
def _load_rows(base, rows, stride, exist, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr):
    """Returns rows [len(rows), BLOCK_D]; the columns from D on are 0, and with MASK also rows that do not exist."""
    d = tl.arange(0, BLOCK_D)
    at = base + rows[:, None] * stride + d[None, :]
    if MASK:
        if BLOCK_D == D:
            return tl.load(at, mask=exist[:, None], other=0.0)
        else:
            return tl.load(at, mask=exist[:, None] & (d < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _attend_keys(
    acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, stop, end, inner, outer,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, MASK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, stop) of a tile to a block's softmax: acc and total are scaled by 2 ** -most."""
    k0 = tl.load(tile + 4)
    ks = tl.load(tile + 5)
    for j0 in tl.range(start, stop, BLOCK_N, num_stages=None if STAGED else 1):
        j = j0 + tl.arange(0, BLOCK_N)
        rows = (k0 + j * ks).to(tl.int64)
        k = _load_rows(k_base, rows, skn, j < end, D, BLOCK_D, MASK)
        s, _ = _log2_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, outer, CAPPED)
        if MASK:
            s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, _NONE)
            top = tl.maximum(most, tl.max(s, 1))
            base = tl.where(top == _NONE, 0.0, top)
        else:
            top = tl.maximum(most, tl.max(s, 1))
            base = top
        p = tl.exp2(s - base[:, None])
        factor = tl.exp2(most - base)
        total = total * factor + tl.sum(p, 1)
        v = _load_rows(v_base, rows, svn, j < end, DV, BLOCK_DV, MASK)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
        most = top
    return acc, total, most


@triton.jit(do_not_specialize=_ANY_LENGTH)
def forward_kernel(
    Q, K, V, OUT, LSE, ITEMS, REFERENCES, TILES, inner, outer,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, slb, slh,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, RESUME: tl.constexpr,
    LOOPS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Writes out and lse of an item. With RESUME, OUT is float32, and both already have the results of other keys."""
    item = ITEMS + tl.program_id(0).to(tl.int64) * 8
    x, head, exists = _query_rows(item, BLOCK_M, HEADS)
    b = tl.load(item + 3).to(tl.int64)
    hk = tl.load(item + 5).to(tl.int64)
    d = tl.arange(0, BLOCK_DV)
    xl = x.to(tl.int64)
    q = _load_rows(Q + b * sqb, head * sqh + xl * sqn, 1, exists, D, BLOCK_D, True)
    lses = LSE + b * slb + head * slh + xl
    mask = exists[:, None] & (d < DV)[None, :]
    if RESUME:
        outs = OUT + b * sob + (head * soh + xl * son)[:, None] + d[None, :]
        acc = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        most = tl.load(lses, mask=exists, other=_NONE) / _LOG2
        total = tl.where(most == _NONE, 0.0, 1.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        most = tl.full([BLOCK_M], _NONE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    k_base = K + b * skb + hk * skh
    v_base = V + b * svb + hk * svh
    for reference in range(tl.load(item + 6), tl.load(item + 7)):
        tile = TILES + tl.load(REFERENCES + reference) * 12
        low, high, inside = _visible_keys(tile, x, exists)
        stop = tl.max(high, 0)
        if SMALL and tl.load(tile + 10) <= _FEW:
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, 0, stop, stop, inner, outer,
                _FEW, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, False,
            )  # fmt: skip
        elif LOOPS == "one":
            start = tl.minimum(tl.min(low, 0), stop)
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, stop, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, True,
            )  # fmt: skip
        else:
            start, left, right, stop = _stretches(low, high, inside, exists, BLOCK_N)
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, left, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, LOOPS == "staged",
            )  # fmt: skip
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, left, right, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, False, True,
            )  # fmt: skip
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, right, stop, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, LOOPS == "staged",
            )  # fmt: skip
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    x, head, exists = _query_rows(item, BLOCK_M, HEADS, True)
    b = tl.load(item + 3, volatile=True).to(tl.int64)
    xl = x.to(tl.int64)
    lses = LSE + b * slb + head * slh + xl
    mask = exists[:, None] & (d < DV)[None, :]
    outs = OUT + b * sob + (head * soh + xl * son)[:, None] + d[None, :]
    tl.store(outs, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
    tl.store(lses, tl.where(none, _NONE, (most + tl.log2(total)) * _LOG2), mask=exists)


@triton.jit
def _dq_of_keys(
    acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, start, stop, end, inner, outer,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, MASK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the keys [start, stop) of a tile to dq."""
    k0 = tl.load(tile + 4)
    ks = tl.load(tile + 5)
    for j0 in tl.range(start, stop, BLOCK_N, num_stages=None if STAGED else 1):
        j = j0 + tl.arange(0, BLOCK_N)
        rows = (k0 + j * ks).to(tl.int64)
        k = _load_rows(k_base, rows, skn, j < end, D, BLOCK_D, MASK)
        v = _load_rows(v_base, rows, svn, j < end, DV, BLOCK_DV, MASK)
        s, tanh = _log2_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, outer, CAPPED)
        if MASK:
            s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, _NONE)
        ds = tl.exp2(s - lse[:, None]) * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        if CAPPED:
            ds = ds * (1 - tanh * tanh)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=_ANY_LENGTH)
def dq_kernel(
    Q, K, V, OUT, DO, LSE, DELTA, DQ, ITEMS, REFERENCES, TILES, inner, outer, scale,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sdb, sdh, sdn, slb, slh, sgb, sgh, sgn,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, RESUME: tl.constexpr,
    LOOPS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Writes dq of an item, and DELTA, the row sums of dout * out. With RESUME, dq is added to DQ, which is float32."""
    item = ITEMS + tl.program_id(0).to(tl.int64) * 8
    x, head, exists = _query_rows(item, BLOCK_M, HEADS)
    b = tl.load(item + 3).to(tl.int64)
    hk = tl.load(item + 5).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    xl = x.to(tl.int64)
    do = _load_rows(DO + b * sdb, head * sdh + xl * sdn, 1, exists, DV, BLOCK_DV, True)
    out = _load_rows(OUT + b * sob, head * soh + xl * son, 1, exists, DV, BLOCK_DV, True)
    of_row = b * slb + head * slh + xl
    lse = tl.load(LSE + of_row, mask=exists, other=_NONE) / _LOG2
    # Rows without a key may have any numbers in dout.
    do = tl.where((lse == _NONE)[:, None], 0.0, do).to(do.dtype)
    lse = tl.where(lse == _NONE, float("inf"), lse)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + of_row, delta, mask=exists)
    q = _load_rows(Q + b * sqb, head * sqh + xl * sqn, 1, exists, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_base = K + b * skb + hk * skh
    v_base = V + b * svb + hk * svh
    for reference in range(tl.load(item + 6), tl.load(item + 7)):
        tile = TILES + tl.load(REFERENCES + reference) * 12
        low, high, inside = _visible_keys(tile, x, exists)
        stop = tl.max(high, 0)
        if SMALL and tl.load(tile + 10) <= _FEW:
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, 0, stop, stop, inner, outer,
                _FEW, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, False,
            )  # fmt: skip
        elif LOOPS == "one":
            start = tl.minimum(tl.min(low, 0), stop)
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, start, stop, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, True,
            )  # fmt: skip
        else:
            start, left, right, stop = _stretches(low, high, inside, exists, BLOCK_N)
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, start, left, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, LOOPS == "staged",
            )  # fmt: skip
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, left, right, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, False, True,
            )  # fmt: skip
            acc = _dq_of_keys(
                acc, q, do, lse, delta, k_base, v_base, tile, skn, svn, low, high, right, stop, stop, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, LOOPS == "staged",
            )  # fmt: skip
    acc = acc * scale
    x, head, exists = _query_rows(item, BLOCK_M, HEADS, True)
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
    first = tl.where(tl.load(tile + 9) > 0, last - hi0, tl.where(hi0 >= last, 0, _FAR))
    stop = tl.where(tl.load(tile + 7) > 0, n0 - lo0 + 1, tl.where(lo0 <= n0, _FAR, 0))
    left = tl.minimum(tl.maximum(first * fold, begin), end)
    left = begin + (left - begin + R - 1) // R * R
    right = tl.minimum(stop * fold, end)
    right = tl.where(left + R <= right, left + (right - left) // R * R, begin)
    return tl.where(right > begin, left, begin).to(tl.int32), right.to(tl.int32)


@triton.jit
def _add_rows(
    dk, dv, k, v, n, Q, DO, LSE, DELTA, tile, head, begin, stop, end, inner, outer, sqh, sqn, sdh, sdn, slh,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the rows [begin, stop) of a tile to dk and dv of the keys n."""
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
        q = _load_rows(Q, head * sqh + x * sqn, 1, exists, D, BLOCK_D, MASK)
        do = _load_rows(DO, head * sdh + x * sdn, 1, exists, DV, BLOCK_DV, MASK)
        of_row = head * slh + x
        if MASK:
            lse = tl.load(LSE + of_row, mask=exists, other=float("inf")) / _LOG2
            delta = tl.load(DELTA + of_row, mask=exists, other=0.0)
        else:
            lse = tl.load(LSE + of_row) / _LOG2
            delta = tl.load(DELTA + of_row)
        s, tanh = _log2_scores(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, outer, CAPPED)
        p = tl.exp2(s - lse[None, :])
        if MASK:
            seen = (n[:, None] >= (lo0 + ls * i)[None, :]) & (n[:, None] < (hi0 + hs * i)[None, :]) & exists[None, :]
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        if CAPPED:
            ds = ds * (1 - tanh * tanh)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=_ANY_LENGTH)
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
    k = _load_rows(K + b * skb + hk * skh, rows, skn, exist, D, BLOCK_D, True)
    v = _load_rows(V + b * svb + hk * svh, rows, svn, exist, DV, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    begin = tl.load(item + 6)
    end = tl.load(item + 7)
    q_base = Q + b * sqb
    do_base = DO + b * sdb
    lse_base = LSE + b * slb
    delta_base = DELTA + b * slb
    # Other heads than a divisor of the block's rows leave rows to mask in each block.
    if LOOPS == "one" or BLOCK_M % HEADS != 0:
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, begin, end, end, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, True,
        )  # fmt: skip
    else:
        left, right = _whole_rows(begin, end, n0, count, tile, BLOCK_M // HEADS)
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, begin, left, end, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, LOOPS == "staged",
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, left, right, end, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, False, True,
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k, v, n, q_base, do_base, lse_base, delta_base, tile, head, right, end, end, inner, outer,
            sqh, sqn, sdh, sdn, slh, HEADS, BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True, LOOPS == "staged",
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
