"""The Triton kernels: attention of all tiles of a step in one launch, forward and backward (`lists.py` has the integers).

A program keeps the softmax of its query rows in registers over all their tiles (FlashAttention, arXiv 2205.14135; online
softmax, arXiv 1805.02867). Nothing is gathered, and no partial result goes through memory within a launch. With RESUME, a
program begins with the results of earlier launches: these merge steps of a ring, and rows of dilated queries.

Scores are in units of log(2): s = inner * q.k, or s = outer * tanh(inner * q.k) if they are capped. All sums are float32.
"""

import triton
import triton.language as tl

_LOG2 = tl.constexpr(0.6931471805599453)
_NONE = tl.constexpr(float("-inf"))
_FAR = tl.constexpr(2147483647)
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
def _query_rows(item, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """Returns the query rows of an item, their heads, and which of them exist."""
    first = tl.load(item)
    step = tl.load(item + 1)
    count = tl.load(item + 2)
    number = tl.arange(0, BLOCK_M)
    row = number // HEADS
    head = tl.load(item + 4).to(tl.int64) + number % HEADS
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
    CAPPED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, stop) of a tile to a block's softmax: acc and total are scaled by 2 ** -most."""
    k0 = tl.load(tile + 4)
    ks = tl.load(tile + 5)
    # The few blocks with a mask are not worth separate buffers and registers.
    for j0 in tl.range(start, stop, BLOCK_N, num_stages=1 if MASK else None):
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
        start, left, right, stop = _stretches(low, high, inside, exists, BLOCK_N)
        acc, total, most = _attend_keys(
            acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, left, stop, inner, outer,
            BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True,
        )  # fmt: skip
        acc, total, most = _attend_keys(
            acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, left, right, stop, inner, outer,
            BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, False,
        )  # fmt: skip
        acc, total, most = _attend_keys(
            acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, right, stop, stop, inner, outer,
            BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, True,
        )  # fmt: skip
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    if not RESUME:
        outs = OUT + b * sob + (head * soh + xl * son)[:, None] + d[None, :]
    tl.store(outs, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
    tl.store(lses, tl.where(none, _NONE, (most + tl.log2(total)) * _LOG2), mask=exists)


@triton.jit(do_not_specialize=_ANY_LENGTH)
def dq_kernel(
    Q, K, V, OUT, DO, LSE, DELTA, DQ, ITEMS, REFERENCES, TILES, inner, outer, scale,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sdb, sdh, sdn, slb, slh, sgb, sgh, sgn,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, RESUME: tl.constexpr,
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
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    of_row = b * slb + head * slh + xl
    tl.store(DELTA + of_row, delta, mask=exists)
    q = _load_rows(Q + b * sqb, head * sqh + xl * sqn, 1, exists, D, BLOCK_D, True)
    lse = tl.load(LSE + of_row, mask=exists, other=float("inf")) / _LOG2
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_base = K + b * skb + hk * skh
    v_base = V + b * svb + hk * svh
    for reference in range(tl.load(item + 6), tl.load(item + 7)):
        tile = TILES + tl.load(REFERENCES + reference) * 12
        low, high, _inside = _visible_keys(tile, x, exists)
        k0 = tl.load(tile + 4)
        ks = tl.load(tile + 5)
        stop = tl.max(high, 0)
        for j0 in range(tl.min(low, 0), stop, BLOCK_N):
            j = j0 + tl.arange(0, BLOCK_N)
            rows = (k0 + j * ks).to(tl.int64)
            k = _load_rows(k_base, rows, skn, j < stop, D, BLOCK_D, True)
            v = _load_rows(v_base, rows, svn, j < stop, DV, BLOCK_DV, True)
            s, tanh = _log2_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, outer, CAPPED)
            seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            # Rows without a key may have any numbers in dout.
            ds = tl.where(seen, p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None]), 0.0)
            if CAPPED:
                ds = ds * (1 - tanh * tanh)
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    acc = acc * scale
    at = DQ + b * sgb + (head * sgh + xl * sgn)[:, None] + d[None, :]
    mask = exists[:, None] & (d < D)[None, :]
    if RESUME:
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(at, acc.to(DQ.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_ANY_LENGTH)
def dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV_, ITEMS, TILES, inner, outer, scale,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, slb, slh, sgb, sgh, sgn, swb, swh, swn,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Adds dk and dv of a key item to float32 tensors, by one atomic operation for each number."""
    item = ITEMS + tl.program_id(0).to(tl.int64) * 8
    tile = TILES + tl.load(item) * 12
    n = tl.load(item + 1) + tl.arange(0, BLOCK_N)
    exist = tl.arange(0, BLOCK_N) < tl.load(item + 2)
    b = tl.load(item + 3).to(tl.int64)
    hk = tl.load(item + 5).to(tl.int64)
    number = tl.arange(0, BLOCK_M)
    head = tl.load(item + 4).to(tl.int64) + number % HEADS
    q0 = tl.load(tile)
    qs = tl.load(tile + 1)
    fold = tl.load(tile + 2)
    lo0 = tl.load(tile + 6)
    ls = tl.load(tile + 7)
    hi0 = tl.load(tile + 8)
    hs = tl.load(tile + 9)
    rows = (tl.load(tile + 4) + n * tl.load(tile + 5)).to(tl.int64)
    k = _load_rows(K + b * skb + hk * skh, rows, skn, exist, D, BLOCK_D, True)
    v = _load_rows(V + b * svb + hk * svh, rows, svn, exist, DV, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    end = tl.load(item + 7)
    for r0 in range(tl.load(item + 6), end, BLOCK_M // HEADS):
        r = r0 + number // HEADS
        exists = (r < end) & (number // HEADS < BLOCK_M // HEADS)
        i = r // fold
        x = (q0 + i * qs + r - i * fold).to(tl.int64)
        q = _load_rows(Q + b * sqb, head * sqh + x * sqn, 1, exists, D, BLOCK_D, True)
        do = _load_rows(DO + b * sdb, head * sdh + x * sdn, 1, exists, DV, BLOCK_DV, True)
        of_row = b * slb + head * slh + x
        lse = tl.load(LSE + of_row, mask=exists, other=float("inf")) / _LOG2
        delta = tl.load(DELTA + of_row, mask=exists, other=0.0)
        s, tanh = _log2_scores(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, outer, CAPPED)
        seen = (n[:, None] >= (lo0 + ls * i)[None, :]) & (n[:, None] < (hi0 + hs * i)[None, :]) & exists[None, :]
        p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        if CAPPED:
            ds = ds * (1 - tanh * tanh)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    d = tl.arange(0, BLOCK_D)
    dw = tl.arange(0, BLOCK_DV)
    at = DK + b * sgb + hk * sgh + rows[:, None] * sgn + d[None, :]
    tl.atomic_add(at, dk * scale, mask=exist[:, None] & (d < D)[None, :], sem="relaxed")
    at = DV_ + b * swb + hk * swh + rows[:, None] * swn + dw[None, :]
    tl.atomic_add(at, dv, mask=exist[:, None] & (dw < DV)[None, :], sem="relaxed")
