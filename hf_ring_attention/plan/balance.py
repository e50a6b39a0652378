"""Layouts that know the documents: every rank has as many tokens as the others, and about as much work.

A zigzag gives each rank a piece of much work and one of little, from both ends of a sequence, and so do these. The tokens of a
row are put in order of their work: the document whose queries see most keys first, and its last token before the others. Each
rank in turn takes tokens from both ends of what is left, as many as it has room for, and as many of them from the heavy end as
make its work the mean. Such a share exists as long as the order is right: from the light end alone it has too little work, from
the heavy end alone too much, and a token makes a small difference. Where balance leaves a choice, the cuts are those that
divide the fewest tokens.

So a document is shared by neighbouring ranks, a long one by as many as its work is worth. The last rank takes first, and short
documents are put in order from their first token on, so that of two ranks that share a document the later one has its later
tokens, and keys travel round the ring in its direction, to the next rank. What is short is tried out.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from .layouts import SequenceLayout, merged_pieces
from .patterns import Pattern
from .problem import Documents
from .work import Work, work_under

#: The work of the first ranks may differ from the mean by this share of a rank's, where that spares a cut.
TOLERANCE = 0.04
#: Documents of at most such a share of a rank's tokens count as short: the share is taken that moves the fewest keys.
SHORT = (0.25, 0.5, 1.0, 2.0)
#: Where there is no even share, long documents are put in order in pieces of a rank's tokens divided by these.
_PIECES = (1, 4, 16, 64)
#: So many ends of documents on either side of a cut are tried in its place.
_NEAR = 4
#: So are so many other cuts on either side, which are this share of a rank's tokens apart.
_OTHERS, _OTHERS_APART = 8, 64


@lru_cache(maxsize=64)
def balanced_layout(seq_len: int, world_size: int, pattern: Pattern, documents: Documents) -> SequenceLayout:
    """Returns the layout "documents" of a batch: for each row, pieces by which all ranks have equal tokens and even work.

    Args:
        documents: of each batch row; the work of all rows together is balanced.
    """
    work, local_len = work_under(pattern, seq_len), -(-seq_len // world_size)
    loads, rows = [0.0] * world_size, []
    for documents_of_row in documents:
        spans = _spans_of_row(documents_of_row, local_len * world_size)
        mean = (sum(loads) + sum(span.work(work) for span in spans)) / world_size
        targets = [mean - load for load in loads]
        divisions = [_shares_of_ranks(spans, int(short * local_len), local_len, work, targets) for short in SHORT]
        shares = min(
            divisions,
            key=lambda shares: (_most_over(shares, work, targets) > 2 * TOLERANCE * mean, _hops_of_keys(shares)),
        )
        rows.append(tuple(merged_pieces(range(span.start, span.stop) for span in share) for share in shares))
        loads = [load + sum(span.work(work) for span in share) for load, share in zip(loads, shares)]
    return SequenceLayout("documents", seq_len, world_size, tuple(rows))


def estimated_imbalance(layout: SequenceLayout, pattern: Pattern, documents: Documents) -> float:
    """Returns about how many times the mean work the busiest rank does, by estimates of `Work`."""
    work, loads = work_under(pattern, layout.seq_len), [0.0] * layout.world_size
    for row, spans in enumerate(documents):
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        for rank in range(layout.world_size):
            for piece in layout.pieces(rank, row):
                first, last = bisect.bisect_right(stops, piece.start), bisect.bisect_left(starts, piece.stop)
                for start, stop in spans[first:last]:
                    loads[rank] += work.of_tokens(max(piece.start - start, 0), min(piece.stop, stop) - start)
    return max(loads) * layout.world_size / (sum(loads) or 1.0)


def mean_keys(pattern: Pattern, documents: Documents) -> float:
    """Returns about how many keys a query sees, of one head; 0 where there are no documents."""
    lengths = [stop - start for row in documents for start, stop in row]
    work = work_under(pattern, max(lengths, default=1))
    return sum(map(work.of_first, lengths)) / (sum(lengths) or 1)


class _Span(NamedTuple):
    """Tokens [start, stop) of a row, of the document that begins at `document`; None for padding, which is no work."""

    start: int
    stop: int
    document: int | None
    size: int

    def work(self, work: Work) -> float:
        """Returns the query-key pairs of the tokens."""
        return 0.0 if self.document is None else work.of_tokens(self.start - self.document, self.stop - self.document)


def _spans_of_row(documents: Sequence[tuple[int, int]], length: int) -> list[_Span]:
    """Returns the documents of a row, and the padding between and behind them."""
    ends = [0, *itertools.chain(*documents), length]
    padding = [_Span(start, stop, None, 0) for start, stop in zip(ends[::2], ends[1::2]) if start < stop]
    return padding + [_Span(start, stop, start, stop - start) for start, stop in documents]


def _most_over(shares: Sequence[Sequence[_Span]], work: Work, targets: Sequence[float]) -> float:
    """Returns how much more work than its target a rank has at most."""
    return max(sum(span.work(work) for span in share) - target for share, target in zip(shares, targets))


def _hops_of_keys(shares: Sequence[Sequence[_Span]]) -> int:
    """Returns about how many keys the ring moves, times the hops of each, where queries see all of a document before them."""
    p = len(shares)
    held: dict[int, list[tuple[int, int, int]]] = {}
    for rank, share in enumerate(shares):
        for span in share:
            if span.document is not None:
                held.setdefault(span.document, []).append((span.start, span.stop, rank))
    one_way = both_ways = 0
    for pieces in held.values():
        pieces.sort()
        for number, (start, stop, rank) in enumerate(pieces):
            hops = [(reader - rank) % p for _, _, reader in pieces[number + 1 :] if reader != rank]
            ahead = max((hop for hop in hops if hop <= p // 2), default=0)
            behind = max((p - hop for hop in hops if hop > p // 2), default=0)
            one_way += (stop - start) * max(hops, default=0)
            both_ways += (stop - start) * (ahead + behind)
    return min(one_way, both_ways)


def _shares_of_ranks(
    spans: Sequence[_Span], short: int, local_len: int, work: Work, targets: Sequence[float]
) -> list[list[_Span]]:
    """Returns the spans of each rank: `local_len` tokens, and about its target of work."""
    order = _Order(spans, short, local_len, work)
    tolerance = TOLERANCE * sum(targets) / len(targets)
    shares: list[list[_Span]] = []
    for ranks in range(len(targets), 0, -1):
        # What the ranks before have too much or too little is shared by the others.
        wanted = targets[ranks - 1] + (order.work_left() - sum(targets[:ranks])) / ranks
        heavy = order.fewest_cuts(wanted, tolerance)
        for pieces in _PIECES:
            if abs(order.error(heavy, wanted)) <= tolerance:
                break
            # The work of long spans rises and falls too much on the way: shorter ones are in a better order.
            order = _Order(_shorter(order.left(), max(1, local_len // pieces)), short, local_len, work)
            heavy = order.fewest_cuts(wanted, tolerance)
        shares.append(list(order.take(heavy)))
    return shares[::-1]


def _shorter(spans: Iterable[_Span], most: int) -> list[_Span]:
    """Returns the spans in pieces of at most so many tokens."""
    return [
        span._replace(start=start, stop=min(start + most, span.stop))
        for span in spans
        for start in range(span.start, span.stop, most)
    ]


class _Order:
    """Tokens in order of their work, of which ranks take from both ends.

    Spans follow each other, those of long documents from their end on. Tokens [low, high) of this order are left.

    Args:
        short: the most tokens of a short document.
        local_len: tokens of a rank.
    """

    def __init__(self, spans: Sequence[_Span], short: int, local_len: int, work: Work) -> None:
        self.short, self.local_len, self.work = short, local_len, work
        works = {span: span.work(work) for span in spans}
        self.spans = sorted(spans, key=lambda span: works[span] / (span.start - span.stop))
        #: Where each span begins in this order, and the work before it.
        self.starts = list(itertools.accumulate((span.stop - span.start for span in self.spans), initial=0))
        self.works = list(itertools.accumulate((works[span] for span in self.spans), initial=0.0))
        self.low, self.high = 0, self.starts[-1]

    def work_left(self) -> float:
        """Returns the work of the tokens that are left."""
        return self._before(self.high) - self._before(self.low)

    def left(self) -> Iterator[_Span]:
        """Yields the spans of the tokens that are left."""
        return self._within(self.low, self.high)

    def take(self, heavy: int) -> Iterator[_Span]:
        """Yields the spans of a rank that takes so many tokens from the heavy end, and leaves the others."""
        low, high = self.low, self.high
        self.low, self.high = low + heavy, high - self.local_len + heavy
        yield from self._within(low, self.low)
        yield from self._within(self.high, high)

    def error(self, heavy: int, wanted: float) -> float:
        """Returns how much more than this work a rank has that takes so many tokens from the heavy end."""
        low, high = self.low + heavy, self.high - self.local_len + heavy
        heavy_end, light_end = (
            self._before(low) - self._before(self.low),
            self._before(self.high) - self._before(high),
        )
        return heavy_end + light_end - wanted

    def fewest_cuts(self, wanted: float, tolerance: float) -> int:
        """Returns how many tokens to take from the heavy end for about the work wanted, with the shortest cuts."""
        least, most, behind = 0, self.local_len, self.high - self.local_len
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if self.error(middle, wanted) >= 0 else (middle, most)
        best = min((least, most), key=lambda heavy: abs(self.error(heavy, wanted)))
        apart = max(1, self.local_len // _OTHERS_APART)
        candidates = {
            best + number * apart for number in range(-_OTHERS, _OTHERS + 1)
        }  # Of a shorter piece of a document.
        for first in (self.low, behind):  # The ends of spans near either cut.
            near = bisect.bisect_right(self.starts, first + best)
            candidates |= {start - first for start in self.starts[max(0, near - _NEAR) : near + _NEAR]}
        errors = {heavy: abs(self.error(heavy, wanted)) for heavy in candidates if 0 <= heavy <= self.local_len}
        fitting = [heavy for heavy, error in errors.items() if error <= tolerance]
        cuts = {heavy: self._keys_before(self.low + heavy) + self._keys_before(behind + heavy) for heavy in fitting}
        return min(fitting, key=lambda heavy: (cuts[heavy], errors[heavy]), default=best)

    def _from_end(self, span: _Span) -> bool:
        return span.size > self.short

    def _first(self, span: _Span, count: int) -> _Span:
        """Returns the first tokens of a span, in this order."""
        if self._from_end(span):
            return span._replace(start=span.stop - count)
        return span._replace(stop=span.start + count)

    def _at(self, token: int) -> tuple[int, int]:
        """Returns the number of the span of a token of this order, and how many tokens of the span are before it."""
        number = min(bisect.bisect_right(self.starts, token), len(self.spans)) - 1
        return number, token - self.starts[number]

    def _before(self, token: int) -> float:
        """Returns the work of all tokens before this one."""
        number, count = self._at(token)
        return self.works[number] + (self._first(self.spans[number], count).work(self.work) if count else 0.0)

    def _keys_before(self, token: int) -> int:
        """Returns how many tokens of its document are before a cut at this token, whose keys the queries behind it need."""
        number, count = self._at(token)
        span = self.spans[number]
        if not count or token == self.starts[number + 1] or span.document is None:
            return 0
        first = self._first(span, count)
        return (first.start if self._from_end(span) else first.stop) - span.document

    def _within(self, start: int, stop: int) -> Iterator[_Span]:
        """Yields the spans of tokens [start, stop) of this order."""
        number, skipped = self._at(start)
        while start < stop:
            span = self.spans[number]
            taken = self._first(span, min(self.starts[number + 1], stop) - self.starts[number])
            if self._from_end(span):
                yield taken._replace(stop=span.stop - skipped)
            else:
                yield taken._replace(start=span.start + skipped)
            number, skipped, start = number + 1, 0, self.starts[number + 1]
