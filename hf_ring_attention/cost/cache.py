"""The bytes of the keys and values in a cache for `generate`: in a cache with every row, and in `ra.PatternCache`.

Latent attention has one latent row for all heads in a cache with every row, and the keys and values of each head in
`ra.PatternCache`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..plan.kept import cache_rows
from ..plan.patterns import Pattern


@dataclass(frozen=True)
class CacheBytes:
    """The bytes of a cache with every row (`whole`), and with the rows that `ra.PatternCache` keeps (`kept`)."""

    whole: int
    kept: int

    def times(self, count: int) -> CacheBytes:
        return CacheBytes(self.whole * count, self.kept * count)


def cache_of_layer(pattern: Pattern, num_kv_heads: int, tokens: int, batch_size: int, row_bytes: int) -> CacheBytes:
    """Returns the bytes of a layer for rows of `tokens` tokens; `row_bytes` are those of a key and a value in one head."""
    row = batch_size * row_bytes
    return CacheBytes(num_kv_heads * tokens * row, cache_rows(pattern, num_kv_heads, tokens) * row)


def sum_of_caches(caches: Iterable[CacheBytes]) -> CacheBytes:
    """Returns the bytes of several layers together."""
    found = list(caches)
    return CacheBytes(sum(x.whole for x in found), sum(x.kept for x in found))
