"""The branches of patterns: segments, windows, sinks and last queries, rules by which a query sees keys of its document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Queries = Literal["dilated", "all"]

#: No number of a pattern is larger: torch counts tokens with 64 bits.
LARGEST = 2**63 - 1


def check_count(owner: str, name: str, value: object, least: int = 1, most: int = LARGEST) -> None:
    """Refuses anything but an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{owner}: {name} must be an integer of at least {least}, got {value!r}")
    if value > most:
        # Python refuses to print an integer of thousands of digits.
        shown = str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
        raise ValueError(f"{owner}: {name} must be at most {most}, got {shown}")


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_dilated(owner: str, length: int | None, dilation: int, queries: str) -> None:
    check_count(owner, "dilation", dilation)
    if length is not None:
        check_count(owner, "length", length)
        if length % dilation:
            raise ValueError(
                f"{owner}: length must be a multiple of dilation, got {length} = {length // dilation} * {dilation} + "
                f"{length % dilation}; use length={length - length % dilation or dilation}"
            )
    check_choice(owner, "queries", queries, ("dilated", "all"))


@dataclass(frozen=True)
class Segment:
    """Blocks of `length` tokens that attend inside themselves, every `dilation`-th token (LongNet, arXiv 2307.02486, 2.2).

    A query sees a key of its own block (`query // length == key // length`) whose position has the head's phase modulo
    `dilation`. With `queries="dilated"` only queries of that same residue take part; with `"all"` every query does.
    `length=None` is one block, the whole document. Lengths are in tokens.

    Raises:
        ValueError: a length or dilation below 1, or a length that is not a multiple of the dilation.

    Example:
        >>> [key for key in range(12) if ra.Segment(length=8, dilation=2).shows(query=4, key=key, phase=0)]
        [0, 2, 4, 6]
        >>> [key for key in range(12) if ra.Segment(length=8, dilation=2).shows(query=5, key=key, phase=0)]
        []
    """

    length: int | None = None
    dilation: int = 1
    queries: Queries = "dilated"

    def __post_init__(self) -> None:
        _check_dilated("Segment", self.length, self.dilation, self.queries)

    def shows(self, query: int, key: int, phase: int, document_length: int | None = None) -> bool:
        """Whether `query` sees `key` in a head of this phase, causality aside."""
        if self.length is not None and query // self.length != key // self.length:
            return False
        residue = phase % self.dilation
        return key % self.dilation == residue and (self.queries == "all" or query % self.dilation == residue)


@dataclass(frozen=True)
class Window:
    """A sliding window: keys nearer than `length` tokens (`abs(query - key) < length`), every `dilation`-th of them.

    Keys have the head's phase modulo `dilation`; with `queries="dilated"` the queries that take part have it too.

    Raises:
        ValueError: a length or dilation below 1, or a length that is not a multiple of the dilation.

    Example:
        >>> [key for key in range(12) if ra.Window(length=4, dilation=2).shows(query=5, key=key, phase=0)]
        [2, 4, 6, 8]
        >>> ra.Window(length=5, dilation=2)
        Traceback (most recent call last):
        ValueError: Window: length must be a multiple of dilation, got 5 = 2 * 2 + 1; use length=4
    """

    length: int
    dilation: int = 1
    queries: Queries = "all"

    def __post_init__(self) -> None:
        check_count("Window", "length", self.length)
        _check_dilated("Window", self.length, self.dilation, self.queries)

    def shows(self, query: int, key: int, phase: int, document_length: int | None = None) -> bool:
        """Whether `query` sees `key` in a head of this phase, causality aside."""
        if abs(query - key) >= self.length:
            return False
        residue = phase % self.dilation
        return key % self.dilation == residue and (self.queries == "all" or query % self.dilation == residue)


@dataclass(frozen=True)
class Sink:
    """The first `tokens` tokens of the document, seen by every query (attention sinks, arXiv 2309.17453).

    Raises:
        ValueError: fewer than 1 token.

    Example:
        >>> ra.Sink(4).shows(query=900, key=3, phase=0)
        True
        >>> ra.Pattern([ra.Sink(4), ra.Window(512)]) == ra.Pattern.parse("window:512+4")
        True
    """

    tokens: int

    def __post_init__(self) -> None:
        check_count("Sink", "tokens", self.tokens)

    def shows(self, query: int, key: int, phase: int, document_length: int | None = None) -> bool:
        """Whether `query` sees `key`, causality aside."""
        return key < self.tokens


@dataclass(frozen=True)
class Last:
    """Every key of the document, for its last `tokens` queries (the last rows of TriangleMix, arXiv 2507.21526).

    A prompt's last queries, which decide how its answer begins, look at all of it, and the queries before them need not. Under
    causality a query sees all keys up to itself, as ever.

    Which queries are the last depends on how long the document is: the same tokens with others behind them are not the last.
    While a row is generated, its document is as long as it has grown, so that each new token is the last and sees every key.

    Raises:
        ValueError: fewer than 1 token.

    Example:
        >>> triangle = ra.Pattern([ra.Sink(1), ra.Window(2), ra.Last(2)])
        >>> for query in range(6):
        ...     keys = {"head": 0, "num_heads": 1, "num_kv_heads": 1, "document_length": 6}
        ...     print([triangle.multiplicity(query, key, **keys) for key in range(6)])
        [1, 0, 0, 0, 0, 0]
        [1, 1, 0, 0, 0, 0]
        [1, 1, 1, 0, 0, 0]
        [1, 0, 1, 1, 0, 0]
        [1, 1, 1, 1, 1, 0]
        [1, 1, 1, 1, 1, 1]
    """

    tokens: int

    def __post_init__(self) -> None:
        check_count("Last", "tokens", self.tokens)

    def shows(self, query: int, key: int, phase: int, document_length: int | None = None) -> bool:
        """Whether `query` sees `key` in a document of so many tokens, causality aside.

        Raises:
            ValueError: no length, or one that ends before the query or the key.
        """
        if document_length is None:
            raise ValueError(
                f"{self}: document_length, the tokens of the document, was expected: it decides which queries are the last"
            )
        if max(query, key) >= document_length:
            raise ValueError(
                f"{self}: positions below the document_length of {document_length} tokens were expected, got query {query} and "
                f"key {key}"
            )
        return query >= document_length - self.tokens


Branch = Segment | Window | Sink | Last

#: By the names that a pattern's dict has for them.
BRANCHES: dict[str, type[Segment] | type[Window] | type[Sink] | type[Last]] = {
    "segment": Segment,
    "window": Window,
    "sink": Sink,
    "last": Last,
}

BRANCH_TYPES = (Segment, Window, Sink, Last)
