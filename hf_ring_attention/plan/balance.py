"""Layouts that know the documents: every rank has as many tokens as the others, and about as much work.

A zigzag gives each rank a piece of much work and one of little, from both ends of a sequence, and so do these. The tokens of a
row are put in order of their work: the document whose queries see most keys first, and its last token before the others. Each
rank in turn takes tokens from both ends of what is left, as many as it has room for, and as many of them from the heavy end as
make its work the mean. Documents are cut between neighbouring ranks only, long ones for as many ranks as their work is worth,
and where balance leaves a choice, the cuts are those that divide the fewest tokens.

The last rank takes first, and short documents are taken from their end too: so of two ranks that share a document the first one
has its first tokens, and keys travel round the ring in its direction, to the next rank.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from .layouts import SequenceLayout, merged_pieces
from .patterns import Pattern
from .problem import Documents
from .work import Work, work_under

#: The work of the first r ranks may differ by this share of a rank's from r times the mean, where that spares a cut.
TOLERANCE = 0.04
#: A division is good where the busiest rank does at most this many times the mean work.
GOOD_BALANCE = 1.08
#: Documents are put in order whole, or else in spans of a rank's tokens divided by these numbers, until balance is good.
PARTS_OF_A_RANK = (0, 1, 2, 4, 8)
#: Documents of at most this share of a rank's tokens are short.
SHORT = 0.5
#: So many ends of documents on either side of a cut are tried in its place.
_NEAR = 8
#: So are so many other cuts on either side, which are this share of a rank's tokens apart.
_OTHERS, _OTHERS_APART = 16, 128


@lru_cache(maxsize=64)
def balanced_layout(seq_len: int, world_size: int, pattern: Pattern, documents: Documents) -> SequenceLayout:
    """Returns the layout "documents" of a batch: for each row, pieces by which all ranks have equal tokens and even work.

    Args:
        documents: of each batch row; the work of all rows together is balanced.
    """
    work, local_len = work_under(pattern, seq_len), -(-seq_len // world_size)
    best: tuple[float, list[list[_Share]]] | None = None
    for parts in PARTS_OF_A_RANK:
        most = max(1, local_len // parts) if parts else seq_len
        loads, rows = [0.0] * world_size, []
        for spans in documents:
            row = _Row(spans, most, int(local_len * SHORT), local_len * world_size, work)
            mean = (sum(loads) + row.works[-1]) / world_size
            shares = row.divided(local_len, [mean - load for load in reversed(loads)])
            rows.append(shares[::-1])
            loads = [load + share.work for load, share in zip(loads, rows[-1])]
        found = max(loads) * world_size / (sum(loads) or 1.0)
        if best is None or found < best[0]:
            best = found, rows
        if found <= GOOD_BALANCE:
            break
    assert best is not None
    pieces = (tuple(merged_pieces(share.pieces) for share in shares) for shares in best[1])
    return SequenceLayout("documents", seq_len, world_size, tuple(pieces))


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
    """Tokens [start, stop) of a row, of the document that begins at `document`, and their work; padding has none.

    In the order of work they follow each other from the end on, or from the start on where the document is short.
    """

    start: int
    stop: int
    document: int
    work: float
    from_end: bool

    def token(self, number: int) -> int:
        """Returns which token of the row has this many of the span before it, in the order of their work."""
        return self.stop - number if self.from_end else self.start + number


class _Share(NamedTuple):
    """What a rank has of a row."""

    pieces: list[range]
    work: float


class _Row:
    """The tokens of a row in order of their work: documents, or spans of them, one behind the other, and then padding.

    Args:
        most: tokens of a document that are put in order together.
        short: the most tokens of a short document.
        length: tokens of the row, with padding.
    """

    def __init__(self, documents: Sequence[tuple[int, int]], most: int, short: int, length: int, work: Work) -> None:
        self.length, self.work = length, work
        ends = [0, *itertools.chain(*documents), length]
        spans = [_Span(start, stop, stop, 0.0, False) for start, stop in zip(ends[::2], ends[1::2]) if start < stop]
        for start, stop in documents:
            count = -(-(stop - start) // most)
            cuts = [start + (stop - start) * number // count for number in range(count + 1)]
            spans += [
                _Span(a, b, start, work.of_tokens(a - start, b - start), stop - start > short)
                for a, b in itertools.pairwise(cuts)
            ]
        self.spans = sorted(spans, key=lambda span: span.work / (span.start - span.stop))
        #: Where each span begins in this order, and the work before it.
        self.starts = list(itertools.accumulate((span.stop - span.start for span in self.spans), initial=0))
        self.works = list(itertools.accumulate((span.work for span in self.spans), initial=0.0))

    def work_of(self, start: int, stop: int) -> float:
        """Returns the work of tokens [start, stop) in this order."""
        return self._work_before(stop) - self._work_before(start)

    def _work_before(self, token: int) -> float:
        number = bisect.bisect_right(self.starts, token) - 1
        if number == len(self.spans):
            return self.works[-1]
        span, done = self.spans[number], token - self.starts[number]
        if not span.work or not done:
            return self.works[number]
        first, last = sorted((span.token(0), span.token(done)))
        return self.works[number] + self.work.of_tokens(first - span.document, last - span.document)

    def divided(self, local_len: int, targets: Sequence[float]) -> list[_Share]:
        """Returns the share of each rank: `local_len` tokens, and about its target of work."""
        shares, missing, tolerance = [], 0.0, TOLERANCE * sum(targets) / len(targets)
        left = _Left(self, local_len, 0, self.length)
        for target in targets:
            heavy = left.fewest_cuts(target + missing, tolerance)
            missing += target - left.work(heavy)
            ends = ((left.low, left.low + heavy), (left.light_from(heavy), left.high))
            shares.append(_Share([piece for end in ends for piece in self._pieces(*end)], left.work(heavy)))
            left = left._replace(low=left.low + heavy, high=left.light_from(heavy))
        return shares

    def before_cut(self, token: int) -> int:
        """Returns how many tokens of a document are before a cut, whose keys the queries behind it need."""
        number = bisect.bisect_left(self.starts, token)
        if number == 0 or self.starts[number] == token:
            return 0
        span = self.spans[number - 1]
        return span.token(token - self.starts[number - 1]) - span.document if span.work else 0

    def _pieces(self, start: int, stop: int) -> Iterator[range]:
        """Yields the runs of the row that are tokens [start, stop) in this order."""
        for number in range(bisect.bisect_right(self.starts, start) - 1, len(self.spans)):
            first, last = max(start, self.starts[number]), min(stop, self.starts[number + 1])
            if first >= last:
                return
            span, begin = self.spans[number], self.starts[number]
            yield range(*sorted((span.token(first - begin), span.token(last - begin))))


class _Left(NamedTuple):
    """The tokens [low, high) of a row, in order of their work, that are left for a rank and those after it."""

    row: _Row
    local_len: int
    low: int
    high: int

    def light_from(self, heavy: int) -> int:
        """Returns where the rank's tokens of the light end begin, if it takes so many of the heavy one."""
        return self.high - self.local_len + heavy

    def work(self, heavy: int) -> float:
        """Returns the rank's work, if it takes so many tokens of the heavy end."""
        return self.row.work_of(self.low, self.low + heavy) + self.row.work_of(self.light_from(heavy), self.high)

    def fewest_cuts(self, wanted: float, tolerance: float) -> int:
        """Returns how many tokens of the heavy end give about the work wanted, and divide the fewest tokens."""
        least, most = 0, self.local_len
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if self.work(middle) >= wanted else (middle, most)
        best = min((least, most), key=lambda heavy: abs(self.work(heavy) - wanted))
        candidates = {best}
        starts = self.row.starts
        for first in (self.low, self.high - self.local_len):  # The ends of documents near either cut.
            near = bisect.bisect_right(starts, first + best)
            candidates |= {start - first for start in starts[max(0, near - _NEAR) : near + _NEAR]}
        apart = max(1, self.local_len // _OTHERS_APART)
        candidates |= {
            best + number * apart for number in range(-_OTHERS, _OTHERS + 1)
        }  # A shorter piece of a document.
        fitting = [x for x in candidates if 0 <= x <= self.local_len and abs(self.work(x) - wanted) <= tolerance]
        return min(fitting, key=lambda heavy: (self._divided(heavy), abs(self.work(heavy) - wanted)), default=best)

    def _divided(self, heavy: int) -> int:
        return self.row.before_cut(self.low + heavy) + self.row.before_cut(self.light_from(heavy))
