"""The Triton kernel of forward, and parts of all kernels: attention of all tiles of a step in one launch (`lists.py`).

A program keeps the softmax of its query rows in registers over all their tiles (FlashAttention, arXiv 2205.14135; online
softmax, arXiv 1805.02867). Nothing is gathered, and no partial result goes through memory within a launch. With RESUME, a
program begins with the results of earlier launches: these merge steps of a ring, and rows of dilated queries.

Scores are in units of log(2): s = inner * q.k, or s = outer * tanh(inner * q.k) if they are capped. All sums are float32.

LOOPS names the loops over a tile: "one" masks every block, "edges" only blocks that need it. "split" has separate loops for
blocks with and without a mask, and "staged" is "split" with buffers (`num_stages`) for blocks with a mask too. With SMALL,
tiles of at most 16 keys, as sinks are, take blocks of 16 keys.
"""

import triton
import triton.language as tl

from .settings import FEW_KEYS

LOG2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))
BEYOND = tl.constexpr(2147483647)
FEW = tl.constexpr(FEW_KEYS)
#: The distances of log-sum-exps change with the number of tokens: Triton must not compile again if 16 divides them.
ANY_LENGTH = ("slb", "slh")


@triton.jit
def log2_scores(products, inner, outer, CAPPED: tl.constexpr):
    """Returns scores, and the tanh of capped ones."""
    if CAPPED:
        tanh = 1 - 2 / (tl.exp2(products * (inner * 2.8853900817779268)) + 1)
        return tanh * outer, tanh
    else:
        return products * inner, products


@triton.jit
def query_rows(item, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, AGAIN: tl.constexpr = False):
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
def visible_keys(tile, x, exists):
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
    return tl.where(inside, low, BEYOND), tl.where(inside, high, 0), inside


@triton.jit
def stretches(low, high, inside, exists, BLOCK_N: tl.constexpr):
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
def load_rows(base, rows, stride, exist, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr):
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
    acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, stop, end, left, right, inner, outer,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, MASK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, stop) of a tile to a block's softmax: acc and total are scaled by 2 ** -most.

    MASK names the blocks that take a mask: "all", "none", or "edges", those outside of [left, right).
    """
    k0 = tl.load(tile + 4)
    ks = tl.load(tile + 5)
    for j0 in tl.range(start, stop, BLOCK_N, num_stages=None if STAGED else 1):
        j = j0 + tl.arange(0, BLOCK_N)
        rows = (k0 + j * ks).to(tl.int64)
        k = load_rows(k_base, rows, skn, j < end, D, BLOCK_D, MASK != "none")
        s, _ = log2_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, outer, CAPPED)
        if MASK == "edges":
            if (j0 < left) | (j0 >= right):
                s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, NONE)
        elif MASK == "all":
            s = tl.where((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, NONE)
        if MASK != "none":
            top = tl.maximum(most, tl.max(s, 1))
            base = tl.where(top == NONE, 0.0, top)
        else:
            top = tl.maximum(most, tl.max(s, 1))
            base = top
        p = tl.exp2(s - base[:, None])
        factor = tl.exp2(most - base)
        total = total * factor + tl.sum(p, 1)
        v = load_rows(v_base, rows, svn, j < end, DV, BLOCK_DV, MASK != "none")
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
        most = top
    return acc, total, most


@triton.jit(do_not_specialize=ANY_LENGTH)
def forward_kernel(
    Q, K, V, OUT, LSE, ITEMS, REFERENCES, TILES, inner, outer,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, slb, slh,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CAPPED: tl.constexpr, RESUME: tl.constexpr,
    LOOPS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Writes out and lse of an item. With RESUME, OUT is float32, and both already have the results of other keys."""
    item = ITEMS + tl.program_id(0).to(tl.int64) * 8
    x, head, exists = query_rows(item, BLOCK_M, HEADS)
    b = tl.load(item + 3).to(tl.int64)
    hk = tl.load(item + 5).to(tl.int64)
    d = tl.arange(0, BLOCK_DV)
    xl = x.to(tl.int64)
    q = load_rows(Q + b * sqb, head * sqh + xl * sqn, 1, exists, D, BLOCK_D, True)
    lses = LSE + b * slb + head * slh + xl
    mask = exists[:, None] & (d < DV)[None, :]
    if RESUME:
        outs = OUT + b * sob + (head * soh + xl * son)[:, None] + d[None, :]
        acc = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        most = tl.load(lses, mask=exists, other=NONE) / LOG2
        total = tl.where(most == NONE, 0.0, 1.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        most = tl.full([BLOCK_M], NONE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    k_base = K + b * skb + hk * skh
    v_base = V + b * svb + hk * svh
    for reference in range(tl.load(item + 6), tl.load(item + 7)):
        tile = TILES + tl.load(REFERENCES + reference) * 12
        low, high, inside = visible_keys(tile, x, exists)
        start, left, right, stop = stretches(low, high, inside, exists, BLOCK_N)
        if SMALL and tl.load(tile + 10) <= FEW:
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, 0, stop, stop, left, right, inner, outer,
                FEW, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", False,
            )  # fmt: skip
        elif LOOPS == "one" or LOOPS == "edges":
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, stop, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "edges" if LOOPS == "edges" else "all", True,
            )  # fmt: skip
        else:
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, start, left, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", LOOPS == "staged",
            )  # fmt: skip
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, left, right, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "none", True,
            )  # fmt: skip
            acc, total, most = _attend_keys(
                acc, total, most, q, k_base, v_base, tile, skn, svn, low, high, right, stop, stop, left, right, inner, outer,
                BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, CAPPED, "all", LOOPS == "staged",
            )  # fmt: skip
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    x, head, exists = query_rows(item, BLOCK_M, HEADS, True)
    b = tl.load(item + 3, volatile=True).to(tl.int64)
    xl = x.to(tl.int64)
    lses = LSE + b * slb + head * slh + xl
    mask = exists[:, None] & (d < DV)[None, :]
    outs = OUT + b * sob + (head * soh + xl * son)[:, None] + d[None, :]
    tl.store(outs, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
    tl.store(lses, tl.where(none, NONE, (most + tl.log2(total)) * LOG2), mask=exists)
