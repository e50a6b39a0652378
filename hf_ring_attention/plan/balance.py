"""Layouts that know the documents: every rank has as many tokens as the others, and about as much work.

Like a zigzag, these layouts give each rank a piece of much work and a piece of little, from both ends of a sequence. The
documents of a row are put in the order of their work: documents whose queries see most keys come first. Each rank in turn
fills its room with tokens from both ends of the rest, with just enough from the heavy end to make its work the mean. If whole
documents make up its work, it takes them, and fills the rest of its room from the light end, where a cut moves few keys.

Neighbouring ranks share a long document, as many as its work is worth. The last rank takes first, and takes the last tokens of
each document, so that keys travel round the ring in its direction, from one rank of a document to the next. If both ends are
too heavy or too light for an even share, documents change their places or are taken from their first token on.
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
from .work import Pairs, work_under

#: The work of a rank may differ from an even share of the rest by this share of the mean, if that spares a cut.
TOLERANCE = 0.04
#: The busiest rank may do this share of the mean more, since a long document on fewer ranks moves fewer bytes: from 8 ranks on,
#: rows of long documents move a fifth less than with even work. Less is allowed on few ranks, since communication weighs little
#: beside computation (`_MOST_OVER_OF_MANY` by the share of ranks beyond two), and if queries see few of the keys.
_MOST_OVER, _MOST_OVER_OF_MANY = 0.085, 0.1
#: Whole documents are added until their work is so near, in tolerances.
_NEAR_ENOUGH = 0.25
#: Document ends to try on each side of a cut.
_ENDS_NEAR = 4
#: Without an even share, documents change their places in the order so often. After that they are put in order in pieces of a
#: rank's tokens divided by these numbers.
_MOVES, _PIECES = 4, (1, 4, 16, 64)


@lru_cache(maxsize=64)
def balanced_layout(seq_len: int, world_size: int, pattern: Pattern, documents: Documents) -> SequenceLayout:
    """Returns the layout "documents" of a batch: ranks have equal tokens of each row, and even work in all rows together."""
    work, local_len = work_under(pattern, seq_len), -(-seq_len // world_size)
    loads, rows = [0.0] * world_size, []
    for documents_of_row in documents:
        spans = _spans_of_row(documents_of_row, local_len * world_size)
        mean = (sum(loads) + sum(span.work(work) for span in spans)) / world_size
        targets = [mean - load for load in loads]
        shares = _shares_of_ranks(spans, local_len, work, targets)
        rows.append(tuple(merged_pieces(range(span.start, span.stop) for span in share) for share in shares))
        loads = [load + sum(span.work(work) for span in share) for load, share in zip(loads, shares)]
    return SequenceLayout("documents", seq_len, world_size, tuple(rows))


def estimated_imbalance(layout: SequenceLayout, pattern: Pattern, documents: Documents) -> float:
    """Returns about how many times the mean work the busiest rank does, by `Pairs`."""
    work, loads = work_under(pattern, layout.seq_len), [0.0] * layout.world_size
    for row, spans in enumerate(documents):
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        for rank in range(layout.world_size):
            for piece in layout.pieces(rank, row):
                first, last = bisect.bisect_right(stops, piece.start), bisect.bisect_left(starts, piece.stop)
                for start, stop in spans[first:last]:
                    first, beyond = max(piece.start - start, 0), min(piece.stop, stop) - start
                    loads[rank] += work.of_tokens(first, beyond)
    return busiest_over_mean(loads)


def busiest_over_mean(work: Sequence[float]) -> float:
    """Returns the work of the busiest rank, divided by the mean; 0 without work."""
    return max(work) * len(work) / (sum(work) or 1)


def mean_keys(pattern: Pattern, documents: Documents) -> float:
    """Returns about how many keys a query of one head sees; 0 without documents."""
    lengths = [stop - start for row in documents for start, stop in row]
    work = work_under(pattern, max(lengths, default=1))
    return sum(map(work.of_document, lengths)) / (sum(lengths) or 1)


class _Span(NamedTuple):
    """Tokens [start, stop) of a row."""

    start: int
    stop: int
    document: range | None  # the tokens of their document; None for padding, which costs nothing
    ascending: bool = False  # whether ranks take its first tokens first, not its last tokens

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.stop - self.start

    def work(self, work: Pairs) -> float:
        """Returns the query-key pairs of the tokens."""
        if self.document is None:
            return 0.0
        first = self.document.start
        return work.of_tokens(self.start - first, self.stop - first)

    def left(self, count: int) -> _Span:
        """Returns the `count` tokens that are taken last."""
        return self._replace(start=self.stop - count) if self.ascending else self._replace(stop=self.start + count)

    def taken(self, count: int) -> _Span:
        """Returns the tokens that are taken before `count` are left."""
        return self._replace(stop=self.stop - count) if self.ascending else self._replace(start=self.start + count)

    def keys_between(self, count: int) -> int:
        """Returns how many keys the two parts of a span may need of each other if `count` tokens are left."""
        if self.document is None or count in (0, self.size):
            return 0
        return min(self.left(count).stop, self.taken(count).stop) - self.document.start


def _spans_of_row(documents: Sequence[tuple[int, int]], length: int) -> list[_Span]:
    """Returns the documents of a row, and the padding between and behind them."""
    ends = [0, *itertools.chain(*documents), length]
    padding = [_Span(start, stop, None) for start, stop in zip(ends[::2], ends[1::2]) if start < stop]
    return padding + [_Span(start, stop, range(start, stop)) for start, stop in documents]


def _shares_of_ranks(
    spans: Sequence[_Span], local_len: int, work: Pairs, targets: Sequence[float]
) -> list[list[_Span]]:
    """Returns the spans of each rank: `local_len` tokens, and about its target of work."""
    mean, world_size = sum(targets) / len(targets), len(targets)
    tolerance = TOLERANCE * mean
    longest = max((span.size for span in spans if span.document is not None), default=1)
    seen = work.of_tokens(longest - 1, longest) / longest  # by the last query
    most = (1 + seen * min(_MOST_OVER, _MOST_OVER_OF_MANY * (1 - 2 / world_size))) * mean
    left, shares = _by_work(spans, work), []
    for ranks in range(len(targets), 0, -1):
        # All remaining ranks share the surplus or deficit of the ranks before.
        wanted = targets[ranks - 1] + (sum(span.work(work) for span in left) - sum(targets[:ranks])) / ranks
        limit = max(wanted + tolerance, most)
        for order in _orders(left, local_len, work, wanted):
            division = order.by_whole_documents(wanted, tolerance) or order.by_few_keys(wanted, limit)
            if wanted - tolerance <= division.work <= limit:
                break
        shares.append(division.share)
        left = division.left
    return shares[::-1]


def _orders(left: list[_Span], local_len: int, work: Pairs, wanted: float) -> Iterator[_Order]:
    """Yields orders of the rest that may give a rank an even share; orders that move documents least come first."""
    order = _Order(left, local_len, work)
    yield order
    for _ in range(_MOVES):
        first, last = left[0], left[-1]
        if order.work_of(local_len) < wanted:  # The rest of the first document is light.
            left = [*left[1:], first]
        elif len(left) == 1:
            half = first.size // 2
            left = [first.taken(half), first.left(half)._replace(ascending=True)]
        elif not last.ascending:  # The last tokens of the last document are heavy.
            left = [*left[:-1], last._replace(ascending=True)]
        else:
            left = [last._replace(ascending=True), *left[:-1]]
        order = _Order(left, local_len, work)
        yield order
    for pieces in _PIECES:
        yield _Order(_by_work(_shorter(left, max(1, local_len // pieces)), work), local_len, work)


def _by_work(spans: Iterable[_Span], work: Pairs) -> list[_Span]:
    """Returns the spans by their work for each token, the most first."""
    return sorted(spans, key=lambda span: -span.work(work) / span.size)


def _shorter(spans: Iterable[_Span], most: int) -> list[_Span]:
    """Returns the spans in pieces of at most `most` tokens."""
    return [
        span._replace(start=start, stop=min(start + most, span.stop))
        for span in spans
        for start in range(span.start, span.stop, most)
    ]


class _Division(NamedTuple):
    """The share of a rank, its work, and the spans left for the other ranks."""

    share: list[_Span]
    left: list[_Span]
    work: float


class _Order:
    """The rest of a row, heavy spans first; a rank takes `local_len` tokens from both ends."""

    def __init__(self, spans: list[_Span], local_len: int, work: Pairs) -> None:
        self.spans, self.local_len, self.work = spans, local_len, work
        #: The tokens before each span, and their work.
        self.tokens = list(itertools.accumulate((span.size for span in spans), initial=0))
        self.works = list(itertools.accumulate((span.work(work) for span in spans), initial=0.0))

    def by_whole_documents(self, wanted: float, tolerance: float) -> _Division | None:
        """Returns a share of the first span and other whole spans, filled from the light end; None if its work is not near."""
        taken: set[int] = set()
        room, work = self.local_len, 0.0
        for number, span in enumerate(self.spans):
            if number and not taken:
                return None
            own, rest = self.works[number + 1] - self.works[number], room - span.size
            if self.tokens[-1] - self.tokens[number + 1] < rest:  # The room is for this span and all behind it.
                break
            if rest < 0 or (over := work + own + self._work_behind(rest) - wanted) > _NEAR_ENOUGH * tolerance:
                continue
            taken.add(number)
            room, work = rest, work + own
            if over >= -_NEAR_ENOUGH * tolerance:
                break
        if not taken or abs(work + self._work_behind(room) - wanted) > tolerance:
            return None
        untaken = [span for number, span in enumerate(self.spans) if number not in taken]
        light = _Order(untaken, room, self.work).division(0)
        return _Division([self.spans[number] for number in taken] + light.share, light.left, work + light.work)

    def by_few_keys(self, least: float, most: float) -> _Division:
        """Returns a share of at least and at most so much work, or near it, whose cuts move the fewest keys."""
        wanted = (least + most) / 2
        best = self._heavy_for(wanted)
        candidates = {best}
        for first in (0, self.tokens[-1] - self.local_len):  # The ends of spans near either cut.
            near = bisect.bisect_right(self.tokens, first + best)
            candidates |= {token - first for token in self.tokens[max(0, near - _ENDS_NEAR) : near + _ENDS_NEAR]}
        works = {heavy: self.work_of(heavy) for heavy in candidates if 0 <= heavy <= self.local_len}
        fitting = [heavy for heavy, work in works.items() if least <= work <= most]
        heavy = min(fitting, key=lambda heavy: (self._keys_at_cuts(heavy), abs(works[heavy] - wanted)), default=best)
        return self.division(heavy)

    def _heavy_for(self, wanted: float) -> int:
        """Returns how many tokens from the heavy end make about this work."""
        least, most = 0, self.local_len
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if self.work_of(middle) >= wanted else (middle, most)
        return min((least, most), key=lambda heavy: abs(self.work_of(heavy) - wanted))

    def division(self, heavy: int) -> _Division:
        """Returns the share with `heavy` tokens from the heavy end, and the rest from the light end."""
        parts = [(span, self._left_of(number, heavy)) for number, span in enumerate(self.spans)]
        share = [span.taken(count) for span, count in parts if count < span.size]
        left = [span.left(count) for span, count in parts if count]
        return _Division(share, left, self.work_of(heavy))

    def work_of(self, heavy: int) -> float:
        """Returns the work of a rank that takes `heavy` tokens from the heavy end."""
        if not self.spans:
            return 0.0
        first, last = self._at_cuts(heavy)
        between = max(0.0, self.works[last] - self.works[first + 1])
        left = (self.spans[number].left(self._left_of(number, heavy)) for number in {first, last})
        return self.works[-1] - between - sum(span.work(self.work) for span in left)

    def _work_behind(self, count: int) -> float:
        """Returns the work of `count` tokens from the light end."""
        token = self.tokens[-1] - count
        number = self._at(token)
        left = self.spans[number].left(token - self.tokens[number])
        return self.works[-1] - self.works[number] - left.work(self.work)

    def _keys_at_cuts(self, heavy: int) -> int:
        """Returns how many keys the parts of cut documents may need of each other."""
        numbers = {*self._at_cuts(heavy)}
        return sum(self.spans[number].keys_between(self._left_of(number, heavy)) for number in numbers)

    def _at_cuts(self, heavy: int) -> tuple[int, int]:
        return self._at(heavy), self._at(self.tokens[-1] - self.local_len + heavy)

    def _at(self, token: int) -> int:
        """Returns the number of the span of a token of this order."""
        return min(bisect.bisect_right(self.tokens, token), len(self.spans)) - 1

    def _left_of(self, number: int, heavy: int) -> int:
        """Returns how many tokens of a span are left if a rank takes `heavy` tokens from the heavy end."""
        stop = self.tokens[-1] - self.local_len + heavy
        return max(0, min(stop, self.tokens[number + 1]) - max(heavy, self.tokens[number]))
