"""The branches of patterns: segments, windows and sinks, rules that show a query keys of its document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """Refuses anything but one of the choices."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


class Border(NamedTuple):
    """An end of the keys of query q: position c ("at", c), q + c ("from_query", c) or (q // w + e) * w ("block", w, e)."""

    kind: Literal["at", "from_query", "block"]
    value: int
    blocks: int = 0

    def position(self, query: int) -> int:
        """Returns the position for query q."""
        if self.kind == "from_query":
            return query + self.value
        if self.kind == "block":
            return (query // self.value + self.blocks) * self.value
        return self.value


#: The first position that a query sees, and the first position beyond.
Borders = tuple[Border, Border]

#: From the first key to the last: the second end is beyond every document.
_EVERY_KEY = Border("at", 0), Border("at", 1 << 62)


class _Branch:
    """A rule that shows a query keys: those between its borders whose positions have the head's phase modulo `dilation`."""

    dilation: int = 1
    queries: Queries = "all"

    def borders(self) -> Borders:
        """Returns the ends of the keys that a query sees."""
        raise NotImplementedError

    def shows(self, query: int, key: int, phase: int) -> bool:
        """Whether `query` sees `key` in a head of this phase, causality aside; plans use borders, and this checks them."""
        raise NotImplementedError


class _Dilated(_Branch):
    """The checks and the text that segments and windows share."""

    length: int | None

    def __post_init__(self) -> None:
        owner, length, dilation = type(self).__name__, self.length, self.dilation
        check_count(owner, "dilation", dilation)
        if length is not None:
            check_count(owner, "length", length)
            if length % dilation:
                raise ValueError(
                    f"{owner}: length must be a multiple of dilation, got {length} = {length // dilation} * {dilation} + "
                    f"{length % dilation}; use length={length - length % dilation or dilation}"
                )
        check_choice(owner, "queries", self.queries, ("dilated", "all"))

    def _shows_residue(self, query: int, key: int, phase: int) -> bool:
        """Returns whether the residues of a query and a key modulo the dilation let the query see the key."""
        residue = phase % self.dilation
        takes_part = self.queries == "all" or query % self.dilation == residue
        return takes_part and key % self.dilation == residue

    def __str__(self) -> str:
        """Returns the text of the branch, with its dilation and queries unless they have their defaults."""
        dilation = f"/{self.dilation}" if self.dilation != 1 else ""
        queries = f":{self.queries}" if self.queries != type(self).queries else ""
        return f"{type(self).__name__.lower()}={self.length or 'all'}{dilation}{queries}"


@dataclass(frozen=True)
class Segment(_Dilated):
    """Blocks of `length` tokens that attend inside themselves, every `dilation`-th token (LongNet, arXiv 2307.02486, 2.2).

    A query sees a key of its block (`query // length == key // length`) whose position has the head's phase modulo
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

    def shows(self, query: int, key: int, phase: int) -> bool:
        """Whether `query` sees `key` in a head of this phase, causality aside."""
        same_block = self.length is None or query // self.length == key // self.length
        return same_block and self._shows_residue(query, key, phase)

    def borders(self) -> Borders:
        """Returns the ends of a query's block."""
        if self.length is None:
            return _EVERY_KEY
        return Border("block", self.length, 0), Border("block", self.length, 1)


@dataclass(frozen=True)
class Window(_Dilated):
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
        super().__post_init__()

    def shows(self, query: int, key: int, phase: int) -> bool:
        """Whether `query` sees `key` in a head of this phase, causality aside."""
        return abs(query - key) < self.length and self._shows_residue(query, key, phase)

    def borders(self) -> Borders:
        """Returns the ends of the window around a query."""
        return Border("from_query", 1 - self.length), Border("from_query", self.length)


@dataclass(frozen=True)
class Sink(_Branch):
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

    def shows(self, query: int, key: int, phase: int) -> bool:
        """Whether `query` sees `key`, causality aside."""
        return key < self.tokens

    def __str__(self) -> str:
        return f"sink={self.tokens}"

    def borders(self) -> Borders:
        """Returns the ends of the first tokens."""
        return Border("at", 0), Border("at", self.tokens)


Branch = Segment | Window | Sink

BRANCH_TYPES = (Segment, Window, Sink)

#: By their names in the text of a pattern.
BRANCHES: dict[str, type[Branch]] = {kind.__name__.lower(): kind for kind in BRANCH_TYPES}
